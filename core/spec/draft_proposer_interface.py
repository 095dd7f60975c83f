"""Interface of the sources of drafts. Torch-free.

A draft is a guess of the next tokens of a sequence. It costs time if it is wrong and never changes an answer: the
engine draws the target model's own token at each drafted place, and keeps the drafts as far as both are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftTokens(NamedTuple):
    """Drafted ids, and the name of the source that proposed them; no ids: nothing is proposed."""

    ids: tuple[int, ...] = ()
    source: str = ""


NO_DRAFT = DraftTokens()


class DraftProposer(Protocol):
    """Proposes the next tokens of one sequence.

    ``tokens[:known]`` are the ids of prompt and answer. Between two calls ``known`` never decreases and known ids do
    not change, so that a source may keep what it has learned of them.
    """

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns at most ``count`` ids that may follow ``tokens[:known]``."""
        ...


class FirstProposal:
    """Asks sources in turn and returns the first proposal that is not empty."""

    def __init__(self, sources: Sequence[DraftProposer]) -> None:
        self._sources = tuple(sources)

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns the proposal of the first source that has one."""
        for source in self._sources:
            found = source.propose(tokens, known, count)
            if found.ids:
                return found
        return NO_DRAFT
