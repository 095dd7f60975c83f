"""/v1/messages: converts content blocks to a chat request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.server.protocol.anthropic_messages import BUDGET, CountTokensRequest, MessagesRequest
from trencadis.server.protocol.chat_completions import ChatRequest
from trencadis.server.routes.field_names import FieldNames
from trencadis.server.routes.message_collector import (
    TEXT_SEPARATOR,
    CollectedMessage,
    InnerRequest,
    MessageCollector,
    check_objects,
    get_text_field,
    make_function_tool,
)

FIELDS = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs.enable_thinking": "thinking",
    BUDGET: "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}
ROLES = ("user", "assistant", "system")
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn thinking on and off."""
BILLING = "x-anthropic-billing-header"
"""Start of a block that some clients put before their instructions. It differs in every request, so that no two prompts
would share a prefix.
"""
ERROR = "Error: "
"""Prefix of the result of a call that failed, since chat templates have no other place for that."""
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}")
Parts = list[tuple[Json, str]]


def make_inner_request(body: CountTokensRequest, mentions: Callable[[str], bool], reasons: bool) -> InnerRequest:
    """Converts ``body`` to a chat request.

    Args:
        mentions: True if the chat template contains the name of a variable.
        reasons: True if answers have reasoning that is parsed separately from content.

    Raises:
        BadRequest: a block, a tool or an option is wrong or not supported; ``param`` is its JSON path.
    """
    collector = MessageCollector()
    system = _read_system(body.system, "system")
    if system:
        collector.begin("system", "system").add(system)
    for i, message in enumerate(check_objects(body.messages, "messages")):
        _add_message(collector, message, f"messages[{i}]")
    messages, names = collector.build_messages()
    fields = body.get_shared_fields() | {"messages": messages}
    last = collector.last
    if last is not None and last.role == "assistant" and last.parts and not last.calls:
        # The client has supplied the beginning of the answer.
        fields["continue_final_message"] = True
    if isinstance(body, MessagesRequest):
        fields["max_tokens"] = body.max_tokens
        if body.stop_sequences is not None:
            fields["stop"] = body.stop_sequences
    _add_tools(body, fields)
    _set_thinking(body, fields, mentions, reasons)
    field_names = dict(FIELDS)
    output = body.output_config or {}
    if output.get("effort") is not None:
        fields["reasoning_effort"] = get_text_field(output, "effort", "output_config")
    form = output.get("format") or body.output_format
    if form is not None:
        fields["response_format"] = _convert_format(form)
        if form is body.output_format:
            field_names |= {"response_format.json_schema": "output_format", "response_format": "output_format"}
    kept = list(range(len(body.tools or [])))
    return InnerRequest(ChatRequest(**fields), FieldNames(field_names, names, kept, "input_schema", "input"))


def _read_system(system: str | list[Json] | None, where: str) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_read_text(block, f"{where}[{i}]") for i, block in enumerate(check_objects(system, where))]
    return TEXT_SEPARATOR.join(text for text in texts if not text.startswith(BILLING))


def _read_text(block: JsonMapping, where: str) -> str:
    if block.get("type", "text") != "text":
        raise BadRequest(f"{where} must be a text block.", param=where)
    return get_text_field(block, "text", where)


def _add_message(collector: MessageCollector, message: JsonMapping, where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    where = f"{where}.content"
    if role == "system":
        collector.begin("system", where).add(_read_system(content or "", where))
    elif isinstance(content, str):
        _get_message(collector, str(role), where).add(content)
    elif role == "assistant":
        _add_assistant_blocks(
            _get_message(collector, "assistant", where), collector, check_objects(content, where), where
        )
    else:
        _add_user_blocks(collector, check_objects(content, where), where)


def _get_message(collector: MessageCollector, role: str, where: str) -> CollectedMessage:
    """Returns the message to extend: Anthropic's API merges consecutive messages of one role, as many templates
    require.
    """
    last = collector.last
    return last if last is not None and last.role == role else collector.begin(role, where)


def _add_user_blocks(collector: MessageCollector, blocks: Sequence[JsonMapping], where: str) -> None:
    said: Parts = []
    for j, block in enumerate(blocks):
        name = f"{where}[{j}]"
        if block.get("type") != "tool_result":
            said += _convert_block(block, name)
            continue
        if said:
            _get_message(collector, "user", where).add(said)
            said = []
        result = collector.add_result(get_text_field(block, "tool_use_id", name), name)
        result.add(_read_tool_result(block, name))
    if said or not blocks:
        _get_message(collector, "user", where).add(said)


def _read_tool_result(block: JsonMapping, where: str) -> str | Parts:
    content, failed = block.get("content"), block.get("is_error") is True
    if content is None or isinstance(content, str):
        return (ERROR if failed else "") + (content or "")
    parts: Parts = [({"type": "text", "text": ERROR}, where)] if failed else []
    for j, one in enumerate(check_objects(content, f"{where}.content")):
        parts += _convert_block(one, f"{where}.content[{j}]")
    return parts or ""


def _convert_block(block: JsonMapping, where: str) -> Parts:
    """Converts a block of a user or of a tool's result to content parts."""
    kind = block.get("type")
    if kind == "text":
        return [({"type": "text", "text": get_text_field(block, "text", where)}, where)]
    if kind == "image":
        return [
            (
                {"type": "image_url", "image_url": {"url": _read_source_url(block.get("source"), f"{where}.source")}},
                where,
            )
        ]
    if kind == "search_result":
        texts = [get_text_field(block, name, where) for name in ("title", "source")]
        texts += [
            _read_text(b, f"{where}.content[{i}]") for i, b in enumerate(check_objects(block.get("content"), where))
        ]
        return [({"type": "text", "text": "\n".join(texts)}, where)]
    if kind == "document":
        return _read_document(block, where)
    if kind == "tool_reference":
        return [({"type": "text", "text": get_text_field(block, "tool_name", where)}, where)]
    raise BadRequest(
        f"{where}.type is {str(kind)[:40]!r}; text, image, tool_use and tool_result are supported.",
        param=f"{where}.type",
    )


def _read_source_url(source: Json, where: str) -> str:
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "url":
        return get_text_field(source, "url", where)
    if kind != "base64":
        raise BadRequest(f"{where}.type must be 'base64' or 'url'; this server keeps no files.", param=f"{where}.type")
    media = get_text_field(source, "media_type", where)
    if not _MEDIA_TYPE.fullmatch(media):
        raise BadRequest(f"{where}.media_type is {media[:40]!r}, which is none.", param=f"{where}.media_type")
    return f"data:{media};base64,{get_text_field(source, 'data', where)}"


def _read_document(block: JsonMapping, where: str) -> Parts:
    given, name = block.get("source"), f"{where}.source"
    source: JsonMapping = given if isinstance(given, Mapping) else {}
    kind, content = source.get("type"), source.get("content")
    title: Parts = (
        [({"type": "text", "text": f"{block['title']}\n"}, where)] if isinstance(block.get("title"), str) else []
    )
    if kind == "text":
        return [*title, ({"type": "text", "text": get_text_field(source, "data", name)}, where)]
    if kind == "content" and isinstance(content, str):
        return [*title, ({"type": "text", "text": content}, where)]
    if kind == "content":
        name = f"{name}.content"
        return title + [
            p for i, b in enumerate(check_objects(content, name)) for p in _convert_block(b, f"{name}[{i}]")
        ]
    raise BadRequest(f"{name} is a file; only documents with text are supported.", param=name)


def _add_assistant_blocks(
    message: CollectedMessage, collector: MessageCollector, blocks: Sequence[JsonMapping], where: str
) -> None:
    said: list[str] = []
    for j, block in enumerate(blocks):
        kind, name = block.get("type"), f"{where}[{j}]"
        if kind == "text":
            said.append(get_text_field(block, "text", name))
        elif kind == "thinking":
            message.thoughts.append(get_text_field(block, "thinking", name))
        elif kind == "tool_use":
            given = block.get("input", {})
            if not isinstance(given, dict):
                raise BadRequest(f"{name}.input must be an object.", param=f"{name}.input")
            collector.add_call(
                message, get_text_field(block, "id", name), get_text_field(block, "name", name), dict(given), name
            )
        elif kind != "redacted_thinking":
            raise BadRequest(
                f"{name}.type is {str(kind)[:40]!r}; text, thinking and tool_use are supported.",
                param=f"{name}.type",
            )
    if said:
        message.add("".join(said))


def _add_tools(body: CountTokensRequest, fields: JsonObject) -> None:
    for i, tool in enumerate(body.tools or []):
        if tool.get("type", "custom") not in ("custom", None):
            raise BadRequest(
                f"tools[{i}].type is {str(tool['type'])[:40]!r}; only tools with an input_schema are supported.",
                param=f"tools[{i}].type",
            )
    if body.tools:
        fields["tools"] = [make_function_tool(tool, "input_schema") for tool in body.tools]
    choice = body.tool_choice or {}
    kind = choice.get("type", "auto")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind != "auto":
        fields["tool_choice"] = "required" if kind == "any" else "none"
    if choice.get("disable_parallel_tool_use") is True and body.tools:
        fields["parallel_tool_calls"] = False


def _set_thinking(body: CountTokensRequest, fields: JsonObject, mentions: Callable[[str], bool], reasons: bool) -> None:
    """Sets the template's options for thinking, and the thinking budget if requests may set one."""
    thinking = body.thinking or {}
    kind = thinking.get("type", "adaptive")
    switch = next((name for name in SWITCHES if mentions(name)), None)
    if thinking and (switch or kind in ("enabled", "disabled")):
        asked = {switch or SWITCHES[0]: kind != "disabled"}
        fields["chat_template_kwargs"] = {**asked, **(body.chat_template_kwargs or {})}
    if thinking.get("display") == "omitted":
        fields["include_reasoning"] = False
    if reasons and thinking.get("budget_tokens") is not None and BUDGET in ChatRequest.model_fields:
        fields[BUDGET] = thinking["budget_tokens"]


def _convert_format(form: Json) -> JsonObject:
    """Converts ``output_config.format`` to chat's ``response_format``."""
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema"), "strict": True}}
