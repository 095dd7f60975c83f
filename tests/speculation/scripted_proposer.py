"""A source of drafts that a function scripts, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trencadis.core.spec.draft_proposer_interface import DraftTokens

Guess = Callable[[Sequence[int], int], int]
"""(tokens, known): the id that follows; below 0: no proposal."""


class ScriptedProposer:
    """Proposes the ids that a function returns, one place after the other."""

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
