"""/v1/responses: converts items to a chat request, and its answer's blocks to items and events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from trencadis.core.errors import BadRequest, QueueFull, TrencadisError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.request import TokenLogprob
from trencadis.server.protocol.base_request import Usage
from trencadis.server.protocol.chat_completions import ChatRequest, TokenLogprobs
from trencadis.server.protocol.responses import (
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
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
    Status,
)
from trencadis.server.routes.json_io import set_items
from trencadis.server.routes.message_translation import (
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
from trencadis.server.routes.openai_output import TokenEntry
from trencadis.server.routes.sse import SseEventTemplate, encode, make_number_mark, make_text_mark

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


def convert_responses(body: ResponsesRequest, max_model_len: int) -> InnerRequest:
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


PREFIX = {"thought": "rs", "text": "msg", "call": "fc"}
CUT = ("length",)
"""Finish reasons of an answer that was cut off by its limit."""
LOGPROB_REPEATS = 4
"""Events at the end of a stream that repeat the log-probabilities of a text."""
MakeEntries = Callable[[Sequence[TokenLogprob]], list[TokenEntry]]


def make_initial_response(
    body: ResponsesRequest, id: str, model: str, temperature: float, top_p: float
) -> ResponsesResponse:
    """Returns the response before its first token, with the fields of the request."""
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


def convert_usage(usage: Usage) -> ResponsesUsage:
    """Converts chat's usage to this API's."""
    details, thoughts = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=details.cached_tokens if details else 0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=thoughts.reasoning_tokens if thoughts else 0),
        total_tokens=usage.total_tokens,
    )


class ResponseWriter:
    """Writes a response as a whole, or as events with sequence numbers.

    Args:
        response: the response before its first token; the writer completes it.
        make_entries: converts log-probabilities to this API's form.
    """

    def __init__(self, response: ResponsesResponse, make_entries: MakeEntries) -> None:
        self.response = response
        self._make_entries = make_entries
        self._streamed_logprobs: dict[int, list[bytes]] = {}
        """JSON of the log-probabilities of a stream, by the index of their block; its last events repeat them."""
        self._mark = make_text_mark()
        self._ids: dict[int, str] = {}
        self._templates: dict[int, SseEventTemplate] = {}
        """Event templates by the index of the block that grows."""
        self._number = 0

    def write_first_events(self, usage: Usage) -> Iterator[bytes]:
        """Yields the first events."""
        for name in ("created", "in_progress"):
            yield self._write_state_event(name)

    def write_events(self, change: BlockEvent) -> Iterator[bytes]:
        """Yields the events of a change; adds the item of a closed block to the response."""
        if isinstance(change, BlockOpened):
            yield from self._write_item_added(change.block)
        elif isinstance(change, BlockDelta):
            yield self._write_delta(change)
        else:
            yield from self._write_item_done(change)

    def add_block(self, change: BlockEvent, lazy: bool = False) -> None:
        """Adds a change to a response that is sent as a whole; ``lazy``: see ``PreparedRequest``."""
        if isinstance(change, BlockClosed):
            item = self._make_item(change.block, "incomplete" if change.cut else "completed", lazy)
            self.response.output.append(item)

    def complete(self, finish: str | None, usage: Usage) -> ResponsesResponse:
        """Returns the response once its last block is closed."""
        made = self.response
        made.usage = convert_usage(usage)
        if finish in CUT:
            made.status, made.incomplete_details = "incomplete", IncompleteDetails()
        else:
            made.status, made.completed_at = "completed", int(time.time())
        return made

    def write_final_events(self) -> Iterator[bytes]:
        """Yields the last event of a complete response."""
        yield self._write_state_event(self.response.status)

    def make_failed_event(self, error: TrencadisError) -> bytes:
        """Returns the last event of a response that ends with an error."""
        code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
        self.response.status = "failed"
        self.response.error = ResponsesFault(code=code, message=error.message)
        return self._write_state_event("failed")

    def _write_item_added(self, block: AnswerBlock) -> Iterator[bytes]:
        if block.kind == "call":
            yield self._write_block_event(
                "output_item.added", block, item=self._make_item(block, "in_progress").model_dump(), item_id=None
            )
            return
        empty: JsonObject = {**self._make_item(block, "in_progress").model_dump(), "content": []}
        yield self._write_block_event("output_item.added", block, item=empty, item_id=None)
        yield self._write_block_event("content_part.added", block, content_index=0, part=self._make_content_part(block))

    def _write_delta(self, change: BlockDelta) -> bytes:
        index = change.block.index
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = self._make_template(change.block)
        shown = b"[]"
        if change.logprobs and change.block.kind == "text":
            shown = encode(self._make_entries(change.logprobs))
            self._streamed_logprobs.setdefault(index, []).append(shown[1:-1])
            change.block.logprobs.clear()
        self._number += 1
        return template.fill(b"%d" % (self._number - 1), encode(change.text), shown)

    def _make_template(self, block: AnswerBlock) -> SseEventTemplate:
        hole, sequence, before = make_text_mark(), make_number_mark(), self._number
        self._number = sequence
        made = self._write_delta_event(BlockDelta(block, hole, []))
        self._number = before
        return SseEventTemplate(made, [b"%d" % sequence, encode(hole), b"[]"])

    def _write_delta_event(self, change: BlockDelta) -> bytes:
        block, text = change.block, change.text
        if block.kind == "call":
            return self._write_block_event("function_call_arguments.delta", block, delta=text)
        if block.kind == "thought":
            return self._write_block_event("reasoning_text.delta", block, content_index=0, delta=text)
        logprobs = [dict(one) for one in self._make_entries(change.logprobs)]
        return self._write_block_event("output_text.delta", block, content_index=0, delta=text, logprobs=logprobs)

    def _write_item_done(self, change: BlockClosed) -> Iterator[bytes]:
        block, text = change.block, change.block.text
        self.add_block(change)
        if block.kind == "call":
            yield self._write_block_event("function_call_arguments.done", block, name=block.name, arguments=text)
        elif block.kind == "thought":
            yield self._write_block_event("reasoning_text.done", block, content_index=0, text=text)
        else:
            logprobs = [one.model_dump() for one in self._make_text(block).logprobs]
            yield self._write_block_event("output_text.done", block, content_index=0, text=text, logprobs=logprobs)
        if block.kind != "call":
            yield self._write_block_event(
                "content_part.done", block, content_index=0, part=self._make_content_part(block)
            )
        yield self._write_block_event(
            "output_item.done", block, item=self.response.output[-1].model_dump(), item_id=None
        )

    def _make_item(self, block: AnswerBlock, status: Status, lazy: bool = False) -> OutputItem:
        id = self._get_item_id(block)
        if block.kind == "call":
            return FunctionCallItem(id=id, status=status, call_id=block.id, name=block.name, arguments=block.text)
        if block.kind == "thought":
            return ReasoningItem(id=id, status=status, content=[ReasoningText(text=block.text)])
        return OutputMessage(id=id, status=status, content=[self._make_text(block, lazy)])

    def _make_text(self, block: AnswerBlock, lazy: bool = False) -> OutputText:
        """The text of a block. In a stream a mark stands for its log-probabilities, as ``_write_event`` knows."""
        text = OutputText(text=block.text)
        if block.index in self._streamed_logprobs:
            text.logprobs = [self._make_mark(block.index)]
        elif lazy:
            set_items(text, "logprobs", block.logprobs, self._make_entries, lazy)
        else:
            text.logprobs = [TokenLogprobs.model_validate(one) for one in self._make_entries(block.logprobs)]
        return text

    def _make_mark(self, index: int) -> TokenLogprobs:
        return TokenLogprobs(token=f"{self._mark}-{index}", logprob=0.0, bytes=[], top_logprobs=[])

    def _make_content_part(self, block: AnswerBlock) -> JsonObject:
        if block.kind == "thought":
            return ReasoningText(text=block.text).model_dump()
        return self._make_text(block).model_dump()

    def _get_item_id(self, block: AnswerBlock) -> str:
        return self._ids.setdefault(block.index, f"{PREFIX[block.kind]}_{secrets.token_hex(16)}")

    def _write_state_event(self, name: str) -> bytes:
        return self._write_event(name, response=self.response.model_dump())

    def _write_block_event(self, name: str, block: AnswerBlock, /, item_id: str | None = "", **fields: Json) -> bytes:
        """Encodes an event about a block; ``item_id`` None: without the item's id."""
        own = {} if item_id is None else {"item_id": self._get_item_id(block)}
        return self._write_event(name, output_index=block.index, **own, **fields)

    def _write_event(self, name: str, /, **fields: Json) -> bytes:
        kind = f"response.{name}"
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        made = f"event: {kind}\ndata: {_encode_json(data)}\n\n".encode()
        for index, entries in self._streamed_logprobs.items():
            mark = _encode_json(self._make_mark(index).model_dump()).encode()
            if mark in made:
                made = made.replace(mark, b",".join(entries))
        return made


def _encode_json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
