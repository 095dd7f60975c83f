"""The interface of a source of drafts, and a source that asks several others in turn. Torch-free.

A draft is a guess of the next tokens of a sequence. It costs time if it is wrong and never changes an answer: the
engine draws the target model's own token at each drafted place, and keeps the drafts as far as both are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class DraftTokens(NamedTuple):
    """Drafted ids, and the name of the source that proposed them; no ids: nothing is proposed."""

    ids: tuple[int, ...] = ()
    source: str = ""


NO_DRAFT = DraftTokens()


class DraftSource(Protocol):
    """Proposes the next tokens of one sequence.

    ``tokens[:known]`` are the ids of prompt and answer. Between two calls ``known`` never decreases and known ids do
    not change, so that a source may keep what it has learned of them.
    """

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns at most ``count`` ids that may follow ``tokens[:known]``."""
        ...


class FirstOf:
    """Asks sources in turn and returns the first proposal that is not empty."""

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        self._sources = tuple(sources)

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns the proposal of the first source that has one."""
        for source in self._sources:
            found = source.propose(tokens, known, count)
            if found.ids:
                return found
        return NO_DRAFT


Guess = Callable[[Sequence[int], int], int]
"""(tokens, known): the id that follows; below 0: no proposal."""


class ScriptedSource:
    """Proposes the ids that a function returns, one place after the other; for tests and measurements."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns the ids that the function gives for each place, up to the first below 0."""
        text = [*tokens[:known]]
        for _ in range(count):
            token = self._guess(text, len(text))
            if token < 0:
                break
            text.append(token)
        return DraftTokens(tuple(text[known:]), "scripted")


def cut_at(ids: Sequence[int], ends: frozenset[int], vocab: int) -> tuple[int, ...]:
    """Returns ``ids`` up to the first that ends a text or is outside the vocabulary: nothing after it can count."""
    for at, token in enumerate(ids):
        if token in ends or not 0 <= token < vocab:
            return tuple(ids[:at])
    return tuple(ids)
