"""Warm-up: compiles every planned bucket, captures graphs within the budget, checks that nothing compiles again.

The work is divided into units: a full warm-up runs all of them before serving, a background warm-up runs them between
steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import ProgramState
from trencadis.core.errors import StartupError, format_error
from trencadis.core.graph_and_bucket_learning_report import FAILED, WARMING
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.memory.memory_division import DECODE, pool_of
from trencadis.core.startup_progress_and_warmup_pacing import Warming

log = logging.getLogger("trencadis.engine")

COMPILING, CAPTURING, VALIDATING, WARM = "compiling", "capturing", "validating", "warm"


class Warmup:
    """The warm-up of one rank.

    Args:
        strict: if a bucket does not compile, or compiles again, the start-up fails.
        report: called after each unit.
        warmed: called when every planned bucket is compiled, and captured as far as memory allows.
    """

    def __init__(
        self,
        graphs: GraphManager,
        captures: GraphCaptures,
        strict: bool = False,
        report: Callable[[Warming], None] = lambda state: None,
        warmed: Callable[[], None] = lambda: None,
    ) -> None:
        self.graphs, self.captures = graphs, captures
        self.strict, self.report = strict, report
        self.buckets = [p.bucket for p in captures.prices]
        self.state = Warming(total=len(self.buckets))
        self.broken: dict[Bucket, str] = {}
        """Buckets that do not compile, or compile again -> the reason."""
        self._warmed = warmed
        self._pieces: Iterator[Bucket] | None = None
        self._spent = 0.0

    # Full warm-up

    def run_all(self) -> None:
        """Runs all units of warm-up.

        Raises:
            StartupError: with ``strict``, a bucket does not compile or compiles again.
        """
        for _ in self._track_progress(self._all()):
            pass
        if self.strict and self.broken:
            bucket, why = next(iter(self.broken.items()))
            raise StartupError(
                f"--strict-warmup: {len(self.broken)} of {len(self.buckets)} buckets fail, {bucket} first: {why}"
            )

    def _all(self) -> Iterator[Bucket]:
        self._begin(COMPILING, len(self.buckets))
        for bucket in self.buckets:
            self._compile(bucket)
            yield bucket
        self._begin(CAPTURING, len(self.buckets))
        for bucket in self.captures.capture_selected():
            yield bucket
        for bucket in self.captures.spend_leftovers():
            yield bucket
        yield from self._validate()

    # Background warm-up

    def advance(self) -> Warming | None:
        """Runs one unit of background warm-up; returns None if none is left."""
        if self._pieces is None:
            self.graphs.now_unready_for(WARMING)
            self._pieces = self._track_progress(self._hottest())
        return self.state if next(self._pieces, None) is not None else None

    def _hottest(self) -> Iterator[Bucket]:
        """Compiles and captures buckets one at a time, always the one with the most launches so far; yields each."""
        rank = {bucket: i for i, bucket in enumerate(self._cold())}
        self._begin(COMPILING, 2 * len(rank))
        while rank:
            bucket = min(rank, key=lambda b: (-self.graphs.hits[b], rank[b]))
            if self.graphs.state(bucket) is ProgramState.PLANNED and bucket not in self.broken:
                self.state.phase = COMPILING
                self._compile(bucket)
            else:
                self.state.phase = CAPTURING
                self.captures.attempt(bucket)
                self.captures.keep(self.captures)
                del rank[bucket]
            yield bucket
        for bucket in self.captures.spend_leftovers():
            yield bucket
        yield from self._validate()

    def _cold(self) -> list[Bucket]:
        """Returns the order for buckets without launches so far: DECODE first, then by strategy."""
        chosen = [*self.captures.selection(), *self.buckets]
        return sorted(dict.fromkeys(chosen), key=lambda b: pool_of(b.stage) != DECODE)

    # Units of work

    def _compile(self, bucket: Bucket) -> None:
        why = ""
        try:
            self.graphs.compile(bucket)
        except Exception as error:
            why = format_error(error)
        self._mark_broken(bucket, why)
        self.captures.observe()

    def _validate(self) -> Iterator[Bucket]:
        """Replays or runs every bucket once, which must not compile anything; yields each."""
        self._begin(VALIDATING, len(self.buckets))
        for bucket in self.buckets:
            if bucket not in self.broken:
                self._rehearse(bucket)
            yield bucket
        self.graphs.now_unready_for(FAILED)
        self.captures.observe()
        self.captures.keep(self.captures)
        if not self.broken:
            self._warmed()
        self._begin(WARM, 0)

    def _rehearse(self, bucket: Bucket) -> None:
        self.graphs.count_recompiles()
        why = ""
        try:
            self.graphs.program(bucket).rehearse()
            self.graphs.backend.synchronize()
        except Exception as error:
            why = format_error(error)
        if again := self.graphs.count_recompiles():
            why = why or f"{again} recipes are compiled again"
        self._mark_broken(bucket, why)

    def _mark_broken(self, bucket: Bucket, why: str) -> None:
        """Records a bucket that fails on any rank as broken on all ranks."""
        if not self.captures.agree.is_true_everywhere(not why):
            self.broken[bucket] = why or "it fails on another rank"
            log.warning("warm-up of %s: %s", bucket, self.broken[bucket])

    # Progress

    def _begin(self, phase: str, total: int) -> None:
        s = self.state
        s.phase, s.done, s.total, s.eta, s.last = phase, 0, total, 0.0, ""
        self._spent = 0.0
        self.report(s)

    def _track_progress(self, pieces: Iterator[Bucket]) -> Iterator[Bucket]:
        """Yields from ``pieces`` while counting progress and seconds; time between pieces does not count."""
        while True:
            start = time.perf_counter()
            bucket = next(pieces, None)
            spent = time.perf_counter() - start
            self.state.seconds += spent
            if bucket is None:
                return
            self._count(bucket, spent)
            yield bucket

    def _count(self, bucket: Bucket, spent: float) -> None:
        s = self.state
        self._spent += spent
        s.done, s.last = s.done + 1, str(bucket)
        s.total = max(s.total, s.done)
        s.eta = self._spent / s.done * (s.total - s.done)
        self.report(s)
