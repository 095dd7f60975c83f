"""Values of parameters in Qwen3's calls: their JSON types, and the grammar rule of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.server.grammars.grammar_writer import ANY, GrammarWriter, quoted
from trencadis.server.grammars.regex_translation import escaped
from trencadis.server.grammars.tool_functions import ToolParameter

END = "</parameter>"
DEPTH = 3
"""Most nested references and choices that are followed."""
_TEXT = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength", "$defs"})


def find_types(schema: Any, root: Any = None, depth: int = DEPTH) -> set[str]:
    """Returns the JSON types that a schema allows; empty if neither it nor a reference within ``root`` names one."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        some = schema.get(key)
        if isinstance(some, list):
            found = [find_types(one, root, depth - 1) for one in some if one is not schema][:64]
            return set() if not all(found) else set().union(*found)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_get_type(one) for one in values}
    return find_types(_resolve_ref(schema.get("$ref"), root), root, depth - 1)


def _get_type(value: Any) -> str:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _resolve_ref(ref: Any, root: Any) -> Any:
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    for part in ref[2:].split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def write_value_rule(writer: GrammarWriter, parameter: ToolParameter) -> str:
    """Writes the rule of a parameter's value and the mark that ends it.

    Raises:
        BadRequest: this form cannot distinguish the types, or has no grammar for the schema.
    """
    types = find_types(parameter.schema, parameter.schema)
    if types == {"string"}:
        return writer.add_rule(f"{_add_text_terminal(writer, parameter)} {quoted(chr(10) + END)}", "lazy")
    if types and "string" not in types:
        return writer.add_rule(f"{writer.add_json(parameter.schema)} {quoted(chr(10) + END)}")
    if types == {"string", "null"} and _allows_any_text(parameter.schema):
        return writer.add_rule(f"{writer.write_free_text(END)} {quoted(chr(10) + END)}", "lazy")
    raise BadRequest(
        f"{parameter.where}: in this form of calls a grammar takes one type, or a text or null.", param=parameter.where
    )


def _allows_any_text(schema: Mapping[str, Any]) -> bool:
    """Returns True if the schema allows any text."""
    options = schema.get("anyOf", [{"type": "string"}])
    return all(one in ({"type": "string"}, {"type": "null"}) for one in options) and not set(schema) & (
        _TEXT - {"type", "$defs"}
    )


def _add_text_terminal(writer: GrammarWriter, parameter: ToolParameter) -> str:
    """Adds the terminal of a text without quotes."""
    schema = parameter.schema
    seen = 0
    while "$ref" in schema and set(schema) <= {"$ref", "$defs"} and seen < DEPTH:
        schema, seen = _resolve_ref(schema["$ref"], parameter.schema) or {}, seen + 1
    if not set(schema) <= _TEXT:
        name = sorted(set(schema) - _TEXT)[0]
        raise BadRequest(f"{parameter.where}.{name} has no grammar in this form of calls.", param=parameter.where)
    parts = [f"~/{ANY}{escaped(END)}{ANY}/", f"/{ANY}/"]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        parts.append(f"/{'|'.join(escaped(one) for one in values if isinstance(one, str))}/")
    if "pattern" in schema:
        parts.append(f"/{make_search_regex(schema['pattern'])}/")
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
    return writer.add_terminal(" & ".join(parts))


def make_search_regex(pattern: str) -> str:
    """Returns a regex of whole texts in which ``pattern`` is found; with alternatives, of texts that it matches as a
    whole.
    """
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if "|" in pattern:
        return pattern
    inner = pattern[start : len(pattern) - end if end else None]
    return f"{'' if start else ANY}(?:{inner}){'' if end else ANY}"
