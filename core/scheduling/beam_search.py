"""Beam search over one request: which continuations are kept and which have ended. Pure Python; independent of the
scheduler.

It gives the sequences of transformers' ``generate(num_beams=w, do_sample=False)``: a step keeps the ``w`` best
continuations that have not ended, by their sum of log-probabilities; a continuation that ends counts if it is among the
``w`` best of its step, by that sum over length ** length_penalty. Sum and length cover only the output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.request import BeamRule, TokenLogprob


class BestTokens(NamedTuple):
    """The most likely next ids of one beam, best first, and their log-probabilities (natural log, raw logits)."""

    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(slots=True, eq=False)
class Beam:
    """One output sequence, as a linked list of steps.

    Args:
        score: sum of the log-probabilities of its tokens.
        index: number of the sequence that computes it, once assigned.
    """

    score: float = 0.0
    last: TokenLogprob | None = None
    parent: Beam | None = None
    index: int = 0

    def items(self) -> list[TokenLogprob]:
        """Returns its tokens, first to last."""
        found: list[TokenLogprob] = []
        beam: Beam | None = self
        while beam is not None and beam.last is not None:
            found.append(beam.last)
            beam = beam.parent
        return found[::-1]


class FoundBeam(NamedTuple):
    """A beam that has ended: its ranking score, and the token that ended it (None: its length)."""

    score: float
    beam: Beam
    stop: int | None


class Continuation(NamedTuple):
    """A beam with one more token, which has ``rank`` among the beam's next tokens (from 0)."""

    score: float
    beam: Beam
    rank: int
    token: int


class BeamSearch:
    """The beams of one request.

    Args:
        width: number of beams.
        limit: largest number of output tokens.
        stops: ids that end a beam.
        least: number of tokens before which ``banned`` ids are excluded.
        top: number of top ids reported with each token.
    """

    def __init__(
        self,
        rule: BeamRule,
        width: int,
        limit: int,
        stops: Collection[int],
        least: int = 0,
        banned: Collection[int] = (),
        top: int = 0,
    ) -> None:
        self._rule, self._width, self._limit = rule, width, limit
        self._stops, self._least, self._banned, self._top = stops, least, banned, top
        self._length = 0
        self._found: list[FoundBeam] = []
        self.running = [Beam()]

    def step(self, best: Mapping[int, BestTokens]) -> bool:
        """Takes the top next tokens of each running beam, by its sequence index.

        Returns False if the search is over.
        """
        banned = self._banned if self._length < self._least else ()
        pool = [
            Continuation(beam.score + logprob, beam, rank, token)
            for beam in self.running
            for rank, (token, logprob) in enumerate(zip(*best[beam.index], strict=True))
            if token not in banned
        ]
        pool.sort(key=lambda c: -c.score)
        self._length += 1
        full = self._length >= self._limit
        ended = [c for c in pool[: self._width] if full or c.token in self._stops]
        scale = self._length**self._rule.length_penalty
        for c in ended:
            stop = c.token if c.token in self._stops else None
            self._found.append(FoundBeam(c.score / scale, self._extend_beam(c, best), stop))
        self._found = sorted(self._found, key=lambda f: -f.score)[: self._width]
        alive = [] if full else [c for c in pool if c.token not in self._stops][: self._width]
        self.running = [self._extend_beam(c, best) for c in alive]
        return self._can_improve()

    def best_beams(self) -> list[FoundBeam]:
        """Returns the outputs, best first; ``width`` of them once the search is over."""
        return list(self._found)

    def _can_improve(self) -> bool:
        """Returns True if a running beam can still become better than the worst one that has ended."""
        if not self.running:
            return False
        if len(self._found) < self._width:
            return True
        early, penalty = self._rule.early_stopping, self._rule.length_penalty
        if early:
            return False
        reach = self._limit if early is None and penalty > 0 else self._length
        return bool(self.running[0].score / reach**penalty > self._found[-1].score)

    def _extend_beam(self, c: Continuation, best: Mapping[int, BestTokens]) -> Beam:
        ids, logprobs = best[c.beam.index]
        item = TokenLogprob(
            c.token, logprobs[c.rank], c.rank + 1, list(ids[: self._top]), list(logprobs[: self._top])
        )  # fmt: skip
        return Beam(c.score, item, c.beam)
