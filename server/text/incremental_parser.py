"""The base of parsers that read an answer while it is written.

A grammar is a coroutine over the whole text, written as if all of it were there; at the end of what has arrived it
waits. No decision depends on how the text was divided into pieces, because each waits until the text it looks at can
no longer change.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")
E = TypeVar("E")
Wait = Generator[None, None, T]
"""A step of a grammar: call it by ``yield from``."""


class IncrementalParser(Generic[E]):
    """Turns a text that arrives in pieces into events. Subclasses write ``parse`` and append to ``events``.

    The text before ``at`` is forgotten between pieces, except from ``held`` on, where a grammar may return to.
    """

    def __init__(self) -> None:
        self.events: list[E] = []
        self.text = ""
        self.at = 0
        self.ended = False
        self.held: int | None = None
        self._run = self.parse()
        self._running = True

    def parse(self) -> Wait[None]:
        """Reads the text from ``at`` to its end."""
        raise NotImplementedError

    def feed(self, text: str) -> list[E]:
        """Returns the events of the text so far that were not returned before."""
        if text:
            first = self.at if self.held is None else self.held
            self.text, self.at = self.text[first:] + text, self.at - first
            self.held = None if self.held is None else 0
            self._resume()
        return self._take_events()

    def finish(self) -> list[E]:
        """Returns the events that are left, once the text has ended."""
        self.ended = True
        self._resume()
        return self._take_events()

    def _resume(self) -> None:
        if self._running:
            try:
                next(self._run)
            except StopIteration:
                self._running = False

    def _take_events(self) -> list[E]:
        events, self.events = self.events, []
        return events

    def wait(self) -> Wait[bool]:
        """Waits for more text; False if there will be none."""
        if self.ended:
            return False
        yield
        return True

    def peek(self, count: int = 1) -> Wait[str]:
        """Returns the next ``count`` characters; fewer at the end of the text."""
        while len(self.text) - self.at < count and (yield from self.wait()):
            pass
        return self.text[self.at : self.at + count]

    def match_literal(self, *literals: str) -> Wait[str]:
        """Returns the literal that comes next, or "". None of ``literals`` may begin with another one."""
        longest = max(map(len, literals))
        while True:
            rest = self.text[self.at : self.at + longest]
            for literal in literals:
                if rest.startswith(literal):
                    return literal
            if not any(literal.startswith(rest) for literal in literals) or not (yield from self.wait()):
                return ""

    def take_literal(self, *literals: str) -> Wait[str]:
        """Returns the literal that comes next, or "", and moves past it; see ``match_literal``."""
        found = yield from self.match_literal(*literals)
        self.at += len(found)
        return found

    def read_run(self, characters: str | None = None) -> Wait[str]:
        """Moves past all ``characters`` that come next (None: blanks) and returns them."""
        out = ""
        while True:
            rest = self.text[self.at :]
            kept = rest.lstrip(characters)
            out += rest[: len(rest) - len(kept)]
            self.at = len(self.text) - len(kept)
            if kept or not (yield from self.wait()):
                return out

    def read_until(self, *marks: str) -> Wait[tuple[str, str]]:
        """Moves to the first mark. Returns the text before it that has not been returned, and the mark.

        The mark is "" while none has arrived: then the text is a part, or all that is left if ``ended``.
        """
        while True:
            if self.at < len(self.text):
                found = [(position, mark) for mark in marks if (position := self.text.find(mark, self.at)) >= 0]
                if found:
                    end, mark = min(found)
                    return self._cut(end), mark
                end = len(self.text) - (0 if self.ended else count_undecided(self.text, self.at, marks))
                if end > self.at:
                    return self._cut(end), ""
            if not (yield from self.wait()):
                return "", ""

    def _cut(self, end: int) -> str:
        out, self.at = self.text[self.at : end], end
        return out


def count_undecided(text: str, start: int, marks: tuple[str, ...]) -> int:
    """Returns the length of the longest suffix of ``text[start:]`` that is a proper prefix of one of ``marks``."""
    longest = max(map(len, marks)) - 1
    tail = text[max(start, len(text) - longest) :]
    for mark in marks:
        if mark[0] in tail:
            break
    else:
        return 0
    for size in range(min(longest, len(text) - start), 0, -1):
        if any(len(mark) > size and text.endswith(mark[:size]) for mark in marks):
            return size
    return 0
