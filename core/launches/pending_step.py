"""A Step in flight on one rank: the pending fetches of its launches, and its output once they are there."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trencadis.core.launches.greedy_and_masked_sample_launches import join_scores
from trencadis.core.step_output import (
    HeadOutput,
    Pooled,
    PoolOutput,
    StepOutput,
    StepStats,
    TargetScores,
    append_pooled,
)
from trencadis.core.token_masks.matcher_manager import PendingSample

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending


class PendingScores(NamedTuple):
    """A SAMPLE launch in flight that scores given ids of the sequence ``key``, at these positions of its prompt."""

    key: int
    positions: list[int]
    fetched: Pending[HeadOutput]


class PooledSlice(NamedTuple):
    """A POOL launch in flight: the key of each output row, and the keys whose rows are not summed."""

    keys: list[int]
    each: set[int]
    rows: Pending[PoolOutput]


@dataclass(slots=True)
class PendingStep:
    """A Step in flight: the pending fetches, and the sequence of each fetched row."""

    number: int
    samples: dict[int, int]
    plan: int = 1
    head: Pending[HeadOutput] | None = None
    pending_sample: PendingSample | None = None
    targets: list[PendingScores] = field(default_factory=list)
    scored: list[PendingScores] = field(default_factory=list)
    pools: list[PooledSlice] = field(default_factory=list)
    stats: list[StepStats] = field(default_factory=list)

    def done(self) -> bool:
        """Returns True if ``result`` would not block."""
        scores = (*self.targets, *self.scored)
        pools = all(p.rows.done() for p in self.pools)
        return pools and (self.head is None or self.head.done()) and all(s.fetched.done() for s in scores)

    def result(self) -> StepOutput:
        """Waits for the fetches."""
        out = StepOutput(self.number, self.samples, stats=self.stats, plan=self.plan)
        out.head = self.head.result() if self.head is not None else None
        if self.pending_sample is not None:
            late = self.pending_sample
            out.failures, out.failed_at, out.text, out.forced = late.failures, late.failed_at, late.text, late.forced
        if self.targets or self.scored or self.pools:
            self._add_of_prompts(out)
        return out

    def _add_of_prompts(self, out: StepOutput) -> None:
        """Adds prompt scores and pooled rows to ``out``."""
        for some, fetches in ((out.targets, self.targets), (out.scored, self.scored)):
            for key, positions, pending in fetches:
                scores = TargetScores(positions, pending.result())
                some[key] = scores if key not in some else join_scores(some[key], scores)
        for part in self.pools:
            values, at = part.rows.result().values, 0
            for key, run in groupby(part.keys):
                each, count = key in part.each, len(list(run))
                rows: Pooled = values[at : at + count] if each else values[at : at + 1].astype(np.float64)
                out.pooled[key] = append_pooled(out.pooled.get(key), rows, each)
                at += count
