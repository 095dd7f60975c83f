"""/v1/messages: converts content blocks to a chat request, its answer's blocks to content blocks and events, and
errors.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from trencadis.core.errors import BadRequest, KeyLimitReached, TrencadisError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.server.protocol.anthropic_messages import (
    BUDGET,
    ContentBlock,
    CountTokensRequest,
    MessagesError,
    MessagesErrorInfo,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ThinkingTokens,
    ToolUseBlock,
)
from trencadis.server.protocol.base_request import Usage
from trencadis.server.protocol.chat_completions import ChatRequest
from trencadis.server.protocol.json_body_limits import find_fault
from trencadis.server.routes.message_translation import (
    TEXT_SEPARATOR,
    AnswerBlock,
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    CollectedMessage,
    FieldNames,
    InnerRequest,
    MessageCollector,
    check_objects,
    get_text_field,
    make_function_tool,
)
from trencadis.server.routes.sse import SseEventTemplate, encode, make_text_mark

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


def convert_messages(body: CountTokensRequest, mentions: Callable[[str], bool], reasons: bool) -> InnerRequest:
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


OVERLOADED = 529
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", OVERLOADED: "overloaded_error",
}  # fmt: skip
"""Error types by status; other 4xx statuses are invalid requests, the rest are server errors."""
BAD_JSON = "INVALID_JSON"
"""Key for arguments of a call that are not a JSON object, which the API's ``input`` must be."""


def get_status(error: TrencadisError) -> int:
    """Returns the status of an error: a full queue or a missing engine is 529 here; a key's own limit is 429."""
    return OVERLOADED if error.status in (429, 503) and not isinstance(error, KeyLimitReached) else error.status


def make_error(error: TrencadisError, request_id: str | None) -> MessagesError:
    """Returns the envelope of an error; the name of the wrong field is added to the message, since the envelope has
    no field for it.
    """
    status = get_status(error)
    kind = TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return MessagesError(error=MessagesErrorInfo(type=kind, message=message), request_id=request_id)


def encode_event(kind: str, /, **fields: Json) -> bytes:
    """Encodes one event of a stream."""
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


PING = encode_event("ping")


def encode_error_event(error: TrencadisError, request_id: str | None) -> bytes:
    """Encodes the event of an error within a stream."""
    return encode_event("error", **make_error(error, request_id).model_dump(exclude={"type"}))


def convert_usage(usage: Usage) -> MessagesUsage:
    """Converts chat's usage to this API's, in which cached tokens are not input tokens."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    thoughts = usage.completion_tokens_details
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
        output_tokens_details=ThinkingTokens(thinking_tokens=thoughts.reasoning_tokens) if thoughts else None,
    )


class MessageWriter:
    """Writes a message as a whole, or as events.

    Args:
        message: the message before its first token; the writer completes it.
    """

    def __init__(self, message: MessagesResponse) -> None:
        self.message = message
        self._templates: dict[int, SseEventTemplate] = {}
        """Event templates by the index of the block that grows."""

    def write_first_events(self, usage: Usage) -> Iterator[bytes]:
        """The first event, once the first token is there; its usage counts no tokens of the answer yet."""
        self.message.usage = convert_usage(usage)
        self.message.usage.output_tokens = 0
        if self.message.usage.output_tokens_details is not None:
            self.message.usage.output_tokens_details.thinking_tokens = 0
        yield encode_event("message_start", message=self.message.model_dump())

    def write_events(self, change: BlockEvent) -> Iterator[bytes]:
        """Yields the events of a change."""
        index = change.block.index
        if isinstance(change, BlockOpened):
            yield encode_event("content_block_start", index=index, content_block=self._make_empty_block(change.block))
            if not index:
                yield PING
        elif isinstance(change, BlockDelta):
            yield self._write_block_delta(change)
        else:
            if change.block.kind == "thought":
                delta = {"type": "signature_delta", "signature": make_signature(change.block.text)}
                yield encode_event("content_block_delta", index=index, delta=delta)
            yield encode_event("content_block_stop", index=index)

    def _write_block_delta(self, change: BlockDelta) -> bytes:
        index = change.block.index
        template = self._templates.get(index)
        if template is None:
            hole = make_text_mark()
            made = _make_block_delta(BlockDelta(change.block, hole, []))
            template = self._templates[index] = SseEventTemplate(made, [encode(hole)])
        return template.fill(encode(change.text))

    def add_block(self, change: BlockEvent, lazy: bool = False) -> None:
        """Adds a change to a message that is sent as a whole."""
        if isinstance(change, BlockClosed):
            self.message.content.append(_make_content_block(change.block))

    def complete(self, reason: str, sequence: str | None, usage: Usage) -> MessagesResponse:
        """Returns the message once its last block is closed."""
        self.message.stop_reason, self.message.stop_sequence = reason, sequence
        self.message.usage = convert_usage(usage)
        return self.message

    def write_final_events(self) -> Iterator[bytes]:
        """Yields the last events of a complete message."""
        delta = {"stop_reason": self.message.stop_reason, "stop_sequence": self.message.stop_sequence}
        yield encode_event("message_delta", delta=delta, usage=self.message.usage.model_dump())
        yield encode_event("message_stop")

    def _make_empty_block(self, block: AnswerBlock) -> JsonObject:
        if block.kind == "text":
            return {"type": "text", "text": ""}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": convert_call_id(block.id), "name": block.name, "input": {}}


def _get_delta(change: BlockDelta) -> dict[str, str]:
    if change.block.kind == "text":
        return {"type": "text_delta", "text": change.text}
    if change.block.kind == "thought":
        return {"type": "thinking_delta", "thinking": change.text}
    return {"type": "input_json_delta", "partial_json": change.text}


def _make_block_delta(change: BlockDelta) -> bytes:
    return encode_event("content_block_delta", index=change.block.index, delta=_get_delta(change))


def _make_content_block(block: AnswerBlock) -> ContentBlock:
    text = block.text
    if block.kind == "text":
        return TextBlock(text=text)
    if block.kind == "thought":
        return ThinkingBlock(thinking=text, signature=make_signature(text))
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or find_fault(given) is not None:
        given = {BAD_JSON: text}
    return ToolUseBlock(id=convert_call_id(block.id), name=block.name, input=given)


def convert_call_id(id: str) -> str:
    """Converts a call's id to this API's form; an id that the model wrote is kept."""
    return f"toolu_{id.removeprefix('call_')}" if id.startswith("call_") else id


def make_signature(thought: str) -> str:
    """Returns a digest of a thought as its signature: clients keep and send it back, and drop thoughts without one."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()
