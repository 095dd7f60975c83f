"""Splits an answer into reasoning and content."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.server.text.incremental_parser import IncrementalParser, Wait


@dataclass(frozen=True, slots=True)
class ReasoningContent:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """Text of the answer after it."""

    text: str


class ReasoningParser(IncrementalParser[ReasoningContent | AnswerContent]):
    """Splits off the reasoning at the beginning of an answer, between ``start`` and ``end``; later tags are text.

    Blanks around a tag belong to it. Reasoning without an ``end`` lasts to the end of the text.

    Args:
        inside: the text begins inside the reasoning, because the prompt ends with ``start`` or the model writes none.
        over: there is no reasoning, because the prompt has closed it.
    """

    def __init__(self, start: str, end: str, inside: bool = False, over: bool = False) -> None:
        self._start, self._end = start, end
        self.inside = inside and not over
        self._over = over
        super().__init__()

    def parse(self) -> Wait[None]:
        """Reads [blanks] [start] [reasoning end] the rest."""
        if not self._over:
            blanks = yield from self.read_run()
            opened = yield from self.take_literal(self._start)
            if opened or self.inside:
                self.inside = True
                yield from self._read_thoughts()
                yield from self.read_run()
            else:
                self._add_text(blanks)
        while self.at < len(self.text) or (yield from self.wait()):
            self._add_text(self.text[self.at :])
            self.at = len(self.text)

    def _read_thoughts(self) -> Wait[None]:
        yield from self.read_run()
        blanks, said = "", False
        while True:
            text, mark = yield from self.read_until(self._end)
            kept = text.rstrip()
            if kept:
                self.events.append(ReasoningContent(blanks + kept))
                said = True
            # Blanks at the end may stand before the tag.
            blanks = text[len(kept) :] if kept else blanks + text
            if mark:
                self.at += len(mark)
                self.inside = False
                return
            if self.ended and self.at == len(self.text):
                if blanks and said:
                    self.events.append(ReasoningContent(blanks))
                return

    def _add_text(self, text: str) -> None:
        if text:
            self.events.append(AnswerContent(text))
