"""/v1/messages: converts blocks to content blocks and events; Anthropic's errors."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator

from trencadis.core.errors import KeyLimitReached, TrencadisError
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.protocol.anthropic_messages import (
    ContentBlock,
    MessagesError,
    MessagesErrorInfo,
    MessagesResponse,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ThinkingTokens,
    ToolUseBlock,
)
from trencadis.server.protocol.base_request import Usage
from trencadis.server.protocol.json_values import find_fault
from trencadis.server.routes.answer_blocks import AnswerBlock, BlockClosed, BlockDelta, BlockEvent, BlockOpened
from trencadis.server.routes.sse import SseEventTemplate, encode, make_text_mark

PATHS = ("/v1/messages",)
OVERLOADED = 529
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", OVERLOADED: "overloaded_error",
}  # fmt: skip
"""Error types by status; other 4xx statuses are invalid requests, the rest are server errors."""
BAD_JSON = "INVALID_JSON"
"""Key for arguments of a call that are not a JSON object, which the API's ``input`` must be."""


def is_anthropic_path(path: str) -> bool:
    """Returns True if ``path`` belongs to this API, so that its errors have Anthropic's form."""
    return path in PATHS or path.startswith(tuple(f"{p}/" for p in PATHS))


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
