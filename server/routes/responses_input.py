"""/v1/responses: converts items to a chat request."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.server.protocol.chat_completions import ChatRequest
from trencadis.server.protocol.responses import ResponsesRequest
from trencadis.server.routes.field_names import FieldNames
from trencadis.server.routes.message_collector import (
    CollectedMessage,
    InnerRequest,
    MessageCollector,
    check_objects,
    get_text_field,
    make_function_tool,
)

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
MIN_OUTPUT_TOKENS = 256
"""Tokens that ``truncation: auto`` leaves for an answer without a limit, but at most half of the context."""


def make_inner_request(body: ResponsesRequest, max_model_len: int) -> InnerRequest:
    """Converts ``body`` to a chat request.

    Raises:
        BadRequest: an item, a tool or an option is wrong or not supported; ``param`` is its JSON path.
    """
    collector = MessageCollector()
    if body.instructions:
        collector.begin("system", "instructions").add(body.instructions)
    if isinstance(body.input, str):
        collector.begin("user", "input").add(body.input)
    elif body.input is None:
        raise BadRequest("input is required.", param="input")
    else:
        for i, item in enumerate(check_objects(body.input, "input")):
            _add_item(collector, item, f"input[{i}]")
    messages, names = collector.build_messages()
    fields = body.get_shared_fields() | {"messages": messages}
    kept = _add_tools(body, fields)
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    if body.shows_tokens:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.truncation == "auto":
        output_tokens = body.max_output_tokens or min(MIN_OUTPUT_TOKENS, max_model_len // 2)
        fields["truncate_prompt_tokens"] = max(1, max_model_len - max(1, output_tokens))
    form = (body.text or {}).get("format")
    if form is not None:
        fields["response_format"] = _convert_format(form)
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = get_text_field(body.reasoning or {}, "effort", "reasoning")
    return InnerRequest(ChatRequest(**fields), FieldNames(FIELDS, names, kept))


def _add_item(collector: MessageCollector, item: JsonMapping, where: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        _add_message(collector, item, where)
    elif kind == "function_call":
        name, id = get_text_field(item, "name", where), get_text_field(item, "call_id", where)
        collector.add_call(
            _get_assistant_message(collector, where), id, name, get_text_field(item, "arguments", where), where
        )
    elif kind == "function_call_output":
        message = collector.add_result(get_text_field(item, "call_id", where), where)
        message.add(_convert_content(item.get("output"), f"{where}.output"), "")
    elif kind == "reasoning":
        thought = _get_reasoning_text(item, where)
        if thought:
            _get_assistant_message(collector, where).thoughts.append(thought)
    elif kind == "item_reference":
        raise BadRequest(f"{where} is an item_reference; no items are kept here: send the item itself.", param=where)
    else:
        raise BadRequest(
            f"{where}.type is {str(kind)[:40]!r}; messages, function calls, their outputs and reasoning are supported.",
            param=f"{where}.type",
        )


def _add_message(collector: MessageCollector, item: JsonMapping, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    content, last = _convert_content(item.get("content"), f"{where}.content"), collector.last
    if role == "assistant":
        # A message of an answer that also has thoughts or calls is joined with them; a second message is a new
        # assistant message.
        spoken = last is not None and last.parts and not last.calls
        (collector.begin(role, where) if spoken else _get_assistant_message(collector, where)).add(content, "")
    elif role in INSTRUCTING and last is not None and last.where == "instructions":
        # Many templates accept only one system message, at the beginning.
        last.add(content)
    else:
        collector.begin(role, where).add(content, "")


def _get_assistant_message(collector: MessageCollector, where: str) -> CollectedMessage:
    """Returns the assistant message that the next item belongs to: items of one answer follow each other."""
    last = collector.last
    return last if last is not None and last.role == "assistant" else collector.begin("assistant", where)


def _convert_content(content: Json, where: str) -> str | list[tuple[Json, str]]:
    if isinstance(content, str):
        return content
    out: list[tuple[Json, str]] = []
    for j, part in enumerate(check_objects(content, where)):
        kind, name = part.get("type"), f"{where}[{j}]"
        if kind == "input_file":
            raise BadRequest(f"{name} is a file; files are not supported.", param=name)
        if kind == "input_image" and part.get("image_url") is None:
            raise BadRequest(f"{name} needs an image_url; this server keeps no files.", param=name)
        out.append((part, name))
    return out


def _get_reasoning_text(item: JsonMapping, where: str) -> str:
    """Returns the text of a reasoning item, or its summary; "" for an encrypted one."""
    for name in ("content", "summary"):
        found = item.get(name)
        if found:
            parts = check_objects(found, f"{where}.{name}")
            return "\n\n".join(get_text_field(part, "text", f"{where}.{name}[{j}]") for j, part in enumerate(parts))
    return ""


def _convert_format(form: Json) -> JsonObject:
    """Converts ``text.format`` to chat's ``response_format``."""
    if not isinstance(form, Mapping):
        raise BadRequest("text.format must be an object with a type.", param="text.format")
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _add_tools(body: ResponsesRequest, fields: JsonObject) -> list[int]:
    """Adds tools and the tool choice; returns the indices of these tools in the request."""
    allowed, choice = _convert_tool_choice(body.tool_choice)
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
            tools.append(make_function_tool(tool, "parameters"))
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


def _convert_tool_choice(choice: str | JsonObject | None) -> tuple[set[str] | None, str | JsonObject | None]:
    """Returns the names that ``allowed_tools`` permits (None: all), and the choice in chat's form."""
    if not isinstance(choice, dict):
        return None, choice
    kind = choice.get("type")
    if kind == "function":
        return None, {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = check_objects(choice.get("tools"), "tool_choice.tools")
        names = {get_text_field(tool, "name", f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)}
        return names, str(choice.get("mode", "auto"))
    raise BadRequest(
        f"tool_choice.type is {str(kind)[:40]!r}; this server runs no tools: only 'function' and 'allowed_tools' are "
        "supported.",
        param="tool_choice.type",
    )
