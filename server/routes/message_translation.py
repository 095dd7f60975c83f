"""Shared parts of APIs whose requests become chat requests: messages with their names, and the answer as blocks.

The messages of the chat request are collected from the other API's items or blocks, with the name of every part, so
that an error names what the client has sent. The answer is cut into blocks, one after another, each of one kind:
thoughts, text or a call. Streams and whole answers are made from the same blocks, so that they cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trencadis.core.errors import BadRequest, TrencadisError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.request import TokenLogprob
from trencadis.server.prompts.answer_reader import AnswerPart, CallPart
from trencadis.server.prompts.output_processor import PieceStep, TextPiece
from trencadis.server.protocol.chat_completions import MAX_MESSAGES, ChatRequest
from trencadis.server.tools.reasoning_parser import AnswerContent, ReasoningContent

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\]|\.tool_calls(?:\[(\d+)\](?:\.function)?)?|\.content\b)?")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(\.parameters\b)?")
_PATH = re.compile(r"\b(?:messages|tools)\[\d+\](?:\.?\w+|\[\d+\])*")


@dataclass(slots=True)
class MessageNames:
    """Names of the parts of one message.

    Args:
        where: name of the message itself.
        content: names of the content parts; empty if the content is one text.
        calls: names of the calls.
    """

    where: str
    content: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FieldNames:
    """Names of the parts of a chat request.

    Args:
        fields: names by field of the chat request, or by path of a part of a field.
        messages: names per message.
        tools: index of each tool in the original request.
        parameters: name of the schema of a tool.
        arguments: name of the arguments of a call.
    """

    fields: Mapping[str, str]
    messages: list[MessageNames] = field(default_factory=list)
    tools: list[int] = field(default_factory=list)
    parameters: str = "parameters"
    arguments: str = "arguments"

    def translate_path(self, path: str) -> str:
        """Returns the original name of the part at ``path`` of the chat request."""
        found = _MESSAGE.match(path)
        if found and int(found[1]) < len(self.messages):
            rest = path[found.end() :].replace(".arguments", f".{self.arguments}")
            return self._translate_message_path(self.messages[int(found[1])], found) + rest
        found = _TOOL.match(path)
        if found and int(found[1]) < len(self.tools):
            schema = f".{self.parameters}" if found[2] else ""
            return f"tools[{self.tools[int(found[1])]}]{schema}{path[found.end() :]}"
        for inner, outer in self.fields.items():
            if path == inner or path.startswith((f"{inner}.", f"{inner}[")):
                return outer + path[len(inner) :]
        return path

    def _translate_message_path(self, names: MessageNames, found: re.Match[str]) -> str:
        if found[2] is not None and int(found[2]) < len(names.content):
            return names.content[int(found[2])]
        if found[3] is not None and int(found[3]) < len(names.calls):
            return names.calls[int(found[3])]
        if "tool_calls" in found[0]:
            return names.calls[0] if names.calls else names.where
        return names.where + found[0].partition("]")[2]

    def translate_message(self, text: str) -> str:
        """Replaces paths and names of fields in a message by the original ones; ordinary words are kept."""
        text = _PATH.sub(lambda m: self.translate_path(m[0]), text)
        for inner, outer in self.fields.items():
            if "_" in inner:
                text = re.sub(rf"(?<![\w.]){inner}\b", outer, text)
        return text


@contextmanager
def translate_errors(names: FieldNames) -> Iterator[None]:
    """Context manager: errors raised inside name the fields of the request that the client sent."""
    try:
        yield
    except TrencadisError as error:
        if error.param is not None:
            error.param = names.translate_path(error.param)
        error.message = names.translate_message(error.message)
        error.args = (error.message,)
        raise


TEXT_SEPARATOR = "\n\n"
"""Separator of two texts that become one message."""


@dataclass(frozen=True, slots=True)
class InnerRequest:
    """A chat request, and the names of its parts in the request that it was converted from."""

    chat: ChatRequest
    names: FieldNames


@dataclass(slots=True)
class CollectedMessage:
    """A message under construction.

    Args:
        parts: content parts with their names.
        is_text: True if the content is one text, which then has no name of its own.
        calls: calls with their names.
        extra_fields: other fields.
    """

    role: str
    where: str
    parts: list[tuple[Json, str]] = field(default_factory=list)
    is_text: bool = True
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[JsonObject, str]] = field(default_factory=list)
    extra_fields: JsonObject = field(default_factory=dict)

    def add(self, content: str | Sequence[tuple[Json, str]], gap: str = TEXT_SEPARATOR) -> None:
        """Adds content: a text, or parts with their names. ``gap`` separates two texts."""
        new = [(content, self.where)] if isinstance(content, str) else list(content)
        if not new:
            return
        self.is_text = self.is_text and isinstance(content, str)
        if self.parts and gap and _is_text(self.parts[-1][0]) and _is_text(new[0][0]):
            self.parts.append((gap, self.where))
        self.parts += new

    def build(self) -> tuple[JsonObject, MessageNames]:
        """Returns the message in chat's form, and its names."""
        message: JsonObject = {"role": self.role, **self.extra_fields}
        names = MessageNames(self.where, calls=[name for _, name in self.calls])
        if self.is_text:
            message["content"] = "".join(text for text, _ in self.parts)
        else:
            message["content"] = [{"type": "text", "text": p} if isinstance(p, str) else p for p, _ in self.parts]
            names.content = [name for _, name in self.parts]
        if self.thoughts:
            message["reasoning"] = TEXT_SEPARATOR.join(self.thoughts)
        if self.calls:
            message["tool_calls"] = [call for call, _ in self.calls]
        return message, names


def _is_text(part: Json) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and "text" in part)


class MessageCollector:
    """Collects chat messages that are built from another API's items or blocks."""

    def __init__(self) -> None:
        self.messages: list[CollectedMessage] = []
        self.names_by_call: dict[str, str] = {}

    @property
    def last(self) -> CollectedMessage | None:
        """The last message, or None."""
        return self.messages[-1] if self.messages else None

    def begin(self, role: str, where: str) -> CollectedMessage:
        """Begins a new message and returns it.

        Raises:
            BadRequest: there are too many messages.
        """
        if len(self.messages) >= MAX_MESSAGES:
            raise BadRequest(f"{where}: the conversation has more than {MAX_MESSAGES} messages.", param=where)
        self.messages.append(CollectedMessage(role, where))
        return self.messages[-1]

    def add_call(self, message: CollectedMessage, id: str, name: str, arguments: Json, where: str) -> None:
        """Adds a call to an assistant message."""
        made = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.calls.append((made, where))
        self.names_by_call[id] = name

    def add_result(self, id: str, where: str) -> CollectedMessage:
        """Begins a new message with the result of the call ``id``."""
        message = self.begin("tool", where)
        message.extra_fields["tool_call_id"] = id
        if id in self.names_by_call:
            message.extra_fields["name"] = self.names_by_call[id]
        return message

    def build_messages(self) -> tuple[list[JsonObject], list[MessageNames]]:
        """Returns the messages in chat's form, and their names."""
        pairs = [message.build() for message in self.messages]
        return [message for message, _ in pairs], [names for _, names in pairs]


def get_text_field(value: JsonMapping, name: str, where: str) -> str:
    """Returns a field of an item that must be a string.

    Raises:
        BadRequest: it is not a string.
    """
    found = value.get(name)
    if not isinstance(found, str):
        raise BadRequest(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return found


def check_objects(value: Json, where: str) -> list[JsonMapping]:
    """Checks that ``value`` is a list of objects and returns it.

    Raises:
        BadRequest: it is not.
    """
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a string or a list of objects.", param=where)
    for i, one in enumerate(value):
        if not isinstance(one, Mapping):
            raise BadRequest(f"{where}[{i}] must be an object with a type.", param=f"{where}[{i}]")
    return value


def make_function_tool(tool: JsonMapping, parameters: str) -> JsonObject:
    """Returns a tool in chat's form; only the fields that chat's clients send are kept, since templates print all of
    it.

    Args:
        parameters: the key of its schema.
    """
    keys = {"name": "name", "description": "description", "parameters": parameters}
    function = {key: tool[given] for key, given in keys.items() if tool.get(given) is not None}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


Kind = Literal["thought", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """A part of an answer.

    Args:
        index: position in the answer.
        id: id of a call.
        name: name of the called function.
        pieces: text, or the arguments of a call as the model wrote them.
        logprobs: log-probabilities of the tokens of a text, if requested.
    """

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text of the block."""
        return "".join(self.pieces)


class BlockOpened(NamedTuple):
    """Event: a block begins."""

    block: AnswerBlock


class BlockDelta(NamedTuple):
    """Event: the open block has more text."""

    block: AnswerBlock
    text: str
    logprobs: list[TokenLogprob]


class BlockClosed(NamedTuple):
    """Event: a block is complete, or (``cut``) the answer has ended within it."""

    block: AnswerBlock
    cut: bool


BlockEvent = BlockOpened | BlockDelta | BlockClosed


class BlockBuilder:
    """Builds the blocks of one choice from its pieces.

    Args:
        ends: ids that end an answer without being part of it.
    """

    def __init__(self, ends: Collection[int] = ()) -> None:
        self.blocks: list[AnswerBlock] = []
        self._ends = ends
        self._open: AnswerBlock | None = None
        self._call = -1
        self._waiting: list[TokenLogprob] = []
        """Log-probabilities of tokens whose text has not arrived yet."""

    def feed(self, piece: TextPiece) -> Iterator[BlockEvent]:
        """Yields the events that a piece of text causes; neighbouring deltas of a block are one."""
        waiting: BlockDelta | None = None
        for event in self._add_steps(piece):
            if isinstance(event, BlockDelta) and waiting is not None and waiting.block is event.block:
                waiting = BlockDelta(event.block, waiting.text + event.text, [*waiting.logprobs, *event.logprobs])
                continue
            if waiting is not None:
                yield waiting
            waiting = event if isinstance(event, BlockDelta) else None
            if waiting is None:
                yield event
        if waiting is not None:
            yield waiting

    def _add_steps(self, piece: TextPiece) -> Iterator[BlockEvent]:
        steps = piece.steps
        if not steps:
            whole = AnswerPart([AnswerContent(piece.text)]) if piece.answer is None else piece.answer
            steps = (PieceStep(whole, piece.logprobs),)
        ended = piece.finish_reason == "stop" and bool(piece.tokens) and piece.tokens[-1] in self._ends
        for step in steps:
            last = ended and step is steps[-1]
            yield from self._add_step(step.answer, step.logprobs[:-1] if last else step.logprobs)

    def _add_step(self, answer: AnswerPart, logprobs: Sequence[TokenLogprob]) -> Iterator[BlockEvent]:
        """Yields the events of some tokens; ``logprobs``: those of the tokens that are part of the answer."""
        self._waiting += logprobs
        for segment in answer.segments:
            if isinstance(segment, CallPart):
                yield from self._add_call_part(segment)
            elif segment.text:
                yield from self._add_text("thought" if isinstance(segment, ReasoningContent) else "text", segment.text)
        if self._open is not None and self._open.kind != "text":
            self._waiting = []

    def finish(self, cut: bool) -> Iterator[BlockEvent]:
        """Closes the last block. ``cut``: the answer did not end by itself."""
        yield from self._close(cut)

    def _add_text(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(AnswerBlock(len(self.blocks), kind))
        assert self._open is not None
        logprobs, self._waiting = (self._waiting, []) if kind == "text" else ([], [])
        self._open.pieces.append(text)
        self._open.logprobs += logprobs
        yield BlockDelta(self._open, text, logprobs)

    def _add_call_part(self, part: CallPart) -> Iterator[BlockEvent]:
        if part.index != self._call:
            self._call = part.index
            yield from self._begin(AnswerBlock(len(self.blocks), "call", part.id, part.name))
        assert self._open is not None
        if part.arguments:
            self._open.pieces.append(part.arguments)
            yield BlockDelta(self._open, part.arguments, [])

    def _begin(self, block: AnswerBlock) -> Iterator[BlockEvent]:
        yield from self._close(False)
        self._open = block
        self.blocks.append(block)
        yield BlockOpened(block)

    def _close(self, cut: bool) -> Iterator[BlockEvent]:
        block, self._open = self._open, None
        if block is not None:
            yield BlockClosed(block, cut)
