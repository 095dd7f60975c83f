"""/v1/responses: from blocks to items and events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from trencadis.core.errors import QueueFull, TrencadisError
from trencadis.core.request import TokenLogprob
from trencadis.server.dialects.blocks import Block, BlockClosed, BlockEvent, BlockGrown, BlockOpened
from trencadis.server.protocol.base import Usage
from trencadis.server.protocol.chat import TokenLogprobs
from trencadis.server.protocol.responses import ResponsesRequest
from trencadis.server.protocol.responses_output import (
    FunctionCallItem,
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponsesFault,
    ResponsesResponse,
    ResponsesUsage,
    Status,
)
from trencadis.server.text.event_template import EventTemplate, encode, mark, number

PREFIX = {"thought": "rs", "text": "msg", "call": "fc"}
CUT = ("length",)
"""Finish reasons of an answer that its limit has cut off."""
Shown = Callable[[list[TokenLogprob]], list[TokenLogprobs]]


def begun(body: ResponsesRequest, id: str, model: str, temperature: float, top_p: float) -> ResponsesResponse:
    """The response before its first token, with what was asked for."""
    asked = body.reasoning or {}
    tools = [{"strict": None, **tool, "type": "function"} for tool in body.tools or []]
    return ResponsesResponse(
        id=id,
        created_at=int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": asked.get("effort"), "summary": None},
        safety_identifier=body.safety_identifier,
        temperature=temperature,
        text={"format": (body.text or {}).get("format") or {"type": "text"}},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=tools,
        top_logprobs=body.top_logprobs or 0,
        top_p=top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def usage_of(usage: Usage) -> ResponsesUsage:
    """Chat's usage in this API's words."""
    details, thoughts = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=details.cached_tokens if details else 0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=thoughts.reasoning_tokens if thoughts else 0),
        total_tokens=usage.total_tokens,
    )


class ResponseWriter:
    """Writes a response: whole, or as events with sequence numbers.

    Args:
        response: before its first token; the writer completes it.
        shown: log-probabilities in this API's form.
    """

    def __init__(self, response: ResponsesResponse, shown: Shown) -> None:
        self.response = response
        self._shown = shown
        self._ids: dict[int, str] = {}
        self._templates: dict[int, EventTemplate] = {}
        """By the index of the block that grows."""
        self._number = 0

    def opening(self, usage: Usage) -> Iterator[bytes]:
        """The first events."""
        for name in ("created", "in_progress"):
            yield self._state(name)

    def events(self, change: BlockEvent) -> Iterator[bytes]:
        """The events of a change; the item of a closed block joins the response."""
        if isinstance(change, BlockOpened):
            yield from self._opened(change.block)
        elif isinstance(change, BlockGrown):
            yield self._grown(change)
        else:
            yield from self._closed(change)

    def take(self, change: BlockEvent) -> None:
        """As ``events``, for a response that is sent whole."""
        if isinstance(change, BlockClosed):
            self.response.output.append(self._item(change.block, "incomplete" if change.cut else "completed"))

    def complete(self, finish: str | None, usage: Usage) -> ResponsesResponse:
        """The response once its last block is closed."""
        made = self.response
        made.usage = usage_of(usage)
        if finish in CUT:
            made.status, made.incomplete_details = "incomplete", IncompleteDetails()
        else:
            made.status, made.completed_at = "completed", int(time.time())
        return made

    def closing(self) -> Iterator[bytes]:
        """The last event of a complete response."""
        yield self._state(self.response.status)

    def failed(self, error: TrencadisError) -> bytes:
        """The last event of a response that an error ends."""
        code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
        self.response.status = "failed"
        self.response.error = ResponsesFault(code=code, message=error.message)
        return self._state("failed")

    def _opened(self, block: Block) -> Iterator[bytes]:
        if block.kind == "call":
            yield self._of("output_item.added", block, item=self._item(block, "in_progress").model_dump(), item_id=None)
            return
        empty: dict[str, Any] = {**self._item(block, "in_progress").model_dump(), "content": []}
        yield self._of("output_item.added", block, item=empty, item_id=None)
        yield self._of("content_part.added", block, content_index=0, part=self._part(block))

    def _grown(self, change: BlockGrown) -> bytes:
        index = change.block.index
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = self._template(change.block)
        shown = b"[]"
        if change.logprobs and change.block.kind == "text":
            shown = encode([one.model_dump() for one in self._shown(change.logprobs)])
        self._number += 1
        return template.fill(b"%d" % (self._number - 1), encode(change.text), shown)

    def _template(self, block: Block) -> EventTemplate:
        hole, place, before = mark(), number(), self._number
        self._number = place
        made = self._written(BlockGrown(block, hole, []))
        self._number = before
        return EventTemplate(made, [b"%d" % place, encode(hole), b"[]"])

    def _written(self, change: BlockGrown) -> bytes:
        block, text = change.block, change.text
        if block.kind == "call":
            return self._of("function_call_arguments.delta", block, delta=text)
        if block.kind == "thought":
            return self._of("reasoning_text.delta", block, content_index=0, delta=text)
        logprobs = [one.model_dump() for one in self._shown(change.logprobs)]
        return self._of("output_text.delta", block, content_index=0, delta=text, logprobs=logprobs)

    def _closed(self, change: BlockClosed) -> Iterator[bytes]:
        block, text = change.block, change.block.text
        self.take(change)
        if block.kind == "call":
            yield self._of("function_call_arguments.done", block, name=block.name, arguments=text)
        elif block.kind == "thought":
            yield self._of("reasoning_text.done", block, content_index=0, text=text)
        else:
            logprobs = [one.model_dump() for one in self._shown(block.logprobs)]
            yield self._of("output_text.done", block, content_index=0, text=text, logprobs=logprobs)
        if block.kind != "call":
            yield self._of("content_part.done", block, content_index=0, part=self._part(block))
        yield self._of("output_item.done", block, item=self.response.output[-1].model_dump(), item_id=None)

    def _item(self, block: Block, status: Status) -> OutputItem:
        id = self._id(block)
        if block.kind == "call":
            return FunctionCallItem(id=id, status=status, call_id=block.id, name=block.name, arguments=block.text)
        if block.kind == "thought":
            return ReasoningItem(id=id, status=status, content=[ReasoningText(text=block.text)])
        text = OutputText(text=block.text, logprobs=self._shown(block.logprobs))
        return OutputMessage(id=id, status=status, content=[text])

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "thought":
            return ReasoningText(text=block.text).model_dump()
        return OutputText(text=block.text, logprobs=self._shown(block.logprobs)).model_dump()

    def _id(self, block: Block) -> str:
        return self._ids.setdefault(block.index, f"{PREFIX[block.kind]}_{secrets.token_hex(16)}")

    def _state(self, name: str) -> bytes:
        return self._event(name, response=self.response.model_dump())

    def _of(self, name: str, block: Block, /, item_id: str | None = "", **fields: Any) -> bytes:
        """An event about a block; ``item_id`` None: without the item's id."""
        own = {} if item_id is None else {"item_id": self._id(block)}
        return self._event(name, output_index=block.index, **own, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
