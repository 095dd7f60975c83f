"""/v1/responses: from items to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.core.errors import BadRequest
from trencadis.server.dialects.names import Names
from trencadis.server.dialects.talk import InnerRequest, Talk, TalkMessage, function_tool, objects, text_field
from trencadis.server.protocol.chat import ChatRequest
from trencadis.server.protocol.responses import ResponsesRequest

FIELDS = {
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
    "logprobs": "top_logprobs",
    "messages": "input",
}
ROLES = ("user", "assistant", "system", "developer")
INSTRUCTING = ("system", "developer")
LEAST_ROOM = 256
"""Tokens that ``truncation: auto`` leaves for an answer without a limit, as far as half of the context has them."""


def inner_request(body: ResponsesRequest, max_model_len: int) -> InnerRequest:
    """The chat request that ``body`` means.

    Raises:
        BadRequest: an item, a tool or an option is wrong or not supported; ``param`` is its JSON path.
    """
    talk = Talk()
    if body.instructions:
        talk.begin("system", "instructions").add(body.instructions)
    if isinstance(body.input, str):
        talk.begin("user", "input").add(body.input)
    elif body.input is None:
        raise BadRequest("input is required.", param="input")
    else:
        for i, item in enumerate(objects(body.input, "input")):
            _item(talk, item, f"input[{i}]")
    messages, names = talk.made()
    fields = body.shared() | {"messages": messages}
    kept = _tools(body, fields)
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    if body.shows_tokens:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.truncation == "auto":
        room = body.max_output_tokens or min(LEAST_ROOM, max_model_len // 2)
        fields["truncate_prompt_tokens"] = max(1, max_model_len - max(1, room))
    form = (body.text or {}).get("format")
    if form is not None:
        fields["response_format"] = _format(form)
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = text_field(body.reasoning or {}, "effort", "reasoning")
    return InnerRequest(ChatRequest(**fields), Names(FIELDS, names, kept))


def _item(talk: Talk, item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        _message(talk, item, where)
    elif kind == "function_call":
        name, id = text_field(item, "name", where), text_field(item, "call_id", where)
        talk.call(_turn(talk, where), id, name, text_field(item, "arguments", where), where)
    elif kind == "function_call_output":
        message = talk.result(text_field(item, "call_id", where), where)
        message.add(_content(item.get("output"), f"{where}.output"), "")
    elif kind == "reasoning":
        thought = _thought(item, where)
        if thought:
            _turn(talk, where).thoughts.append(thought)
    elif kind == "item_reference":
        raise BadRequest(f"{where} is an item_reference; no items are kept here: send the item itself.", param=where)
    else:
        raise BadRequest(
            f"{where}.type is {str(kind)[:40]!r}; messages, function calls, their outputs and reasoning are supported.",
            param=f"{where}.type",
        )


def _message(talk: Talk, item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    content, last = _content(item.get("content"), f"{where}.content"), talk.last
    if role == "assistant":
        # A message of an answer that also has thoughts or calls is one with them; a second message is another turn.
        spoken = last is not None and last.parts and not last.calls
        (talk.begin(role, where) if spoken else _turn(talk, where)).add(content, "")
    elif role in INSTRUCTING and last is not None and last.where == "instructions":
        # Many templates take one system message only, at the beginning.
        last.add(content)
    else:
        talk.begin(role, where).add(content, "")


def _turn(talk: Talk, where: str) -> TalkMessage:
    """The turn of the assistant that the next item belongs to: items of one answer follow each other."""
    last = talk.last
    return last if last is not None and last.role == "assistant" else talk.begin("assistant", where)


def _content(content: Any, where: str) -> str | list[tuple[Any, str]]:
    if isinstance(content, str):
        return content
    out: list[tuple[Any, str]] = []
    for j, part in enumerate(objects(content, where)):
        kind, name = part.get("type"), f"{where}[{j}]"
        if kind == "input_file":
            raise BadRequest(f"{name} is a file; files are not supported.", param=name)
        if kind == "input_image" and part.get("image_url") is None:
            raise BadRequest(f"{name} needs an image_url; this server keeps no files.", param=name)
        out.append((part, name))
    return out


def _thought(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item, or its summary; "" for one that only its maker can read."""
    for name in ("content", "summary"):
        found = item.get(name)
        if found:
            parts = objects(found, f"{where}.{name}")
            return "\n\n".join(text_field(part, "text", f"{where}.{name}[{j}]") for j, part in enumerate(parts))
    return ""


def _format(form: Any) -> dict[str, Any]:
    """``text.format`` as chat's ``response_format``."""
    if not isinstance(form, Mapping):
        raise BadRequest("text.format must be an object with a type.", param="text.format")
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _tools(body: ResponsesRequest, fields: dict[str, Any]) -> list[int]:
    """Adds tools and the choice among them; returns which of the request's tools they are."""
    allowed, choice = _choice(body.tool_choice)
    tools, kept = [], []
    for i, tool in enumerate(body.tools or []):
        kind = tool.get("type", "function")
        if kind != "function":
            raise BadRequest(
                f"tools[{i}].type is {str(kind)[:40]!r}; this server runs no tools: only 'function' is supported.",
                param=f"tools[{i}].type",
            )
        name = tool.get("name")
        if allowed is None or (isinstance(name, str) and name in allowed):
            tools.append(function_tool(tool, "parameters"))
            kept.append(i)
    if allowed is not None and len(tools) < len(allowed):
        raise BadRequest("tool_choice.tools names a function that tools lack.", param="tool_choice.tools")
    if tools:
        fields["tools"] = tools
    if choice is not None and (tools or choice != "auto"):
        fields["tool_choice"] = choice
    if body.parallel_tool_calls is not None and tools:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    return kept


def _choice(choice: str | dict[str, Any] | None) -> tuple[set[str] | None, str | dict[str, Any] | None]:
    """The names that ``allowed_tools`` leaves (None: all), and the choice as chat has it."""
    if not isinstance(choice, dict):
        return None, choice
    kind = choice.get("type")
    if kind == "function":
        return None, {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = objects(choice.get("tools"), "tool_choice.tools")
        names = {text_field(tool, "name", f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)}
        return names, str(choice.get("mode", "auto"))
    raise BadRequest(
        f"tool_choice.type is {str(kind)[:40]!r}; this server runs no tools: only 'function' and 'allowed_tools' are "
        "supported.",
        param="tool_choice.type",
    )
