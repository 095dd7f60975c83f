"""Divides an answer into what the model thinks and what it says."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.server.text.incremental import IncrementalParser, Wait


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """Text of the answer after it."""

    text: str


class ReasoningParser(IncrementalParser[Thought | Spoken]):
    """Reasoning stands at the beginning of an answer, between ``start`` and ``end``; later tags are text.

    Blanks beside a tag belong to it. Reasoning without an ``end`` lasts to the end of the text.

    Args:
        inside: whether the text begins inside, because the prompt ends with ``start`` or the model writes none.
        over: whether there is no reasoning, because the prompt has closed it.
    """

    def __init__(self, start: str, end: str, inside: bool = False, over: bool = False) -> None:
        self._start, self._end = start, end
        self.inside = inside and not over
        self._over = over
        super().__init__()

    def grammar(self) -> Wait[None]:
        """[blanks] [start] [reasoning end] the rest."""
        if not self._over:
            blanks = yield from self.run_of()
            opened = yield from self.takes(self._start)
            if opened or self.inside:
                self.inside = True
                yield from self._thoughts()
                yield from self.run_of()
            else:
                self._say(blanks)
        while self.at < len(self.text) or (yield from self.wait()):
            self._say(self.text[self.at :])
            self.at = len(self.text)

    def _thoughts(self) -> Wait[None]:
        yield from self.run_of()
        blanks, said = "", False
        while True:
            text, mark = yield from self.until(self._end)
            kept = text.rstrip()
            if kept:
                self.events.append(Thought(blanks + kept))
                said = True
            # Blanks at the end may stand before the tag.
            blanks = text[len(kept) :] if kept else blanks + text
            if mark:
                self.at += len(mark)
                self.inside = False
                return
            if self.ended and self.at == len(self.text):
                if blanks and said:
                    self.events.append(Thought(blanks))
                return

    def _say(self, text: str) -> None:
        if text:
            self.events.append(Spoken(text))
