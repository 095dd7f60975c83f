"""An answer as blocks, one after another, each of one kind: thoughts, text or a call.

Streams and whole answers are made from the same blocks, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trencadis.core.request import TokenLogprob
from trencadis.server.prompts.answer_reader import CallPart
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.tools.reasoning_parser import AnswerContent, ReasoningContent

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
        """Yields the events that a piece of text causes."""
        segments = [AnswerContent(piece.text)] if piece.answer is None else piece.answer.segments
        self._waiting += self._select_logprobs(piece)
        for segment in segments:
            if isinstance(segment, CallPart):
                yield from self._add_call_part(segment)
            elif segment.text:
                yield from self._add_text("thought" if isinstance(segment, ReasoningContent) else "text", segment.text)
        if self._open is not None and self._open.kind != "text":
            self._waiting = []

    def finish(self, cut: bool) -> Iterator[BlockEvent]:
        """Closes the last block. ``cut``: the answer did not end by itself."""
        yield from self._close(cut)

    def _select_logprobs(self, piece: TextPiece) -> list[TokenLogprob]:
        ended = piece.finish_reason == "stop" and piece.tokens and piece.tokens[-1] in self._ends
        return piece.logprobs[: len(piece.tokens) - 1] if ended else piece.logprobs

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
