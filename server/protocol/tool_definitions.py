"""Tools of a request: checked before anything is rendered, with the JSON path of a fault."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping, JsonObject

NAME = re.compile(r"[^\s\"'<>{}()\[\]=,;]{1,128}")
"""A function's name, in a request and in an answer; it excludes the marks of all call formats."""


def check_tools(tools: Sequence[JsonMapping] | None, choice: str | JsonMapping | None) -> None:
    """Checks ``tools`` and ``tool_choice``.

    Raises:
        BadRequest: ``param`` is the JSON path of the fault.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise BadRequest("When using `tool_choice`, `tools` must be set.", param="tool_choice")
        return
    if not tools:
        raise BadRequest("tools must not be empty; leave it out instead.", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{i}]")
        if name in names:
            raise BadRequest(f"Two tools are named {name[:60]!r}.", param=f"tools[{i}].function.name")
        names.add(name)
    _check_choice(choice, names)


def _check_tool(tool: JsonMapping, path: str) -> str:
    kind = tool.get("type", "function")
    if kind != "function":
        raise BadRequest(f"{path}.type is {str(kind)[:40]!r}; only 'function' is supported.", param=f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"{path} needs a function with a name.", param=f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest(
            f"{path}.function.name must have 1 to 128 characters, without blanks, quotes or brackets.",
            param=f"{path}.function.name",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise BadRequest(f"{path}.function.description must be a text.", param=f"{path}.function.description")
    where, schema = f"{path}.function.parameters", function.get("parameters")
    if schema is not None and not isinstance(schema, Mapping):
        raise BadRequest(f"{where} must be a JSON schema, an object.", param=where)
    if schema and schema.get("type", "object") != "object":
        raise BadRequest(f"{where}.type must be 'object', got {str(schema['type'])[:40]!r}.", param=f"{where}.type")
    if schema and not isinstance(schema.get("properties", {}), Mapping):
        raise BadRequest(f"{where}.properties must be an object.", param=f"{where}.properties")
    if not isinstance(function.get("strict", False), bool | None):
        raise BadRequest(f"{path}.function.strict must be true or false.", param=f"{path}.function.strict")
    return name


def _check_choice(choice: str | JsonMapping | None, names: set[str]) -> None:
    if choice in (None, "none", "auto", "required"):
        return
    wanted: Sequence[str | None] = _list_allowed(choice) if is_subset(choice) else [get_named_function(choice)]
    for name in wanted:
        if name is None:
            raise BadRequest(
                'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}.',
                param="tool_choice",
            )
        if name not in names:
            raise BadRequest(f"tool_choice names the function {name[:60]!r}, which tools lack.", param="tool_choice")


def is_subset(choice: Json) -> TypeGuard[JsonObject]:
    """Returns True if a choice names functions that may be called, of those that a request has."""
    return isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"


def _list_allowed(choice: JsonMapping) -> list[str]:
    """Returns the functions that a choice of ``allowed_tools`` names.

    Raises:
        BadRequest: it has no mode, or names none.
    """
    inner = choice.get("allowed_tools")
    inner = inner if isinstance(inner, Mapping) else {}
    tools = inner.get("tools")
    names = [get_named_function(tool) for tool in tools] if isinstance(tools, list) else []
    found = [name for name in names if name is not None]
    if not found or len(found) < len(names) or inner.get("mode") not in ("auto", "required"):
        raise BadRequest(
            "tool_choice.allowed_tools must hold a mode, 'auto' or 'required', and functions by name.",
            param="tool_choice.allowed_tools",
        )
    return found


def select_allowed_tools(
    tools: list[JsonObject] | None, choice: str | JsonObject | None
) -> tuple[list[JsonObject] | None, str | JsonObject | None]:
    """Returns checked tools and choice without ``allowed_tools``: the allowed tools, and its mode."""
    if tools is None or not is_subset(choice):
        return tools, choice
    names = _list_allowed(choice)
    return [tool for tool in tools if tool["function"]["name"] in names], choice["allowed_tools"]["mode"]


def get_named_function(choice: Json) -> str | None:
    """Returns the function that ``tool_choice`` names; None if it names none."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def get_schemas(tools: Sequence[JsonMapping] | None) -> dict[str, JsonObject]:
    """Returns the schemas of the parameters of checked tools, by name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()}
