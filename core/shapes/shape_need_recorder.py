"""Records the needs of served traffic: bounded, fading with load, and readable by another thread. Pure Python.

A Step only adds to a table of counts, which takes some 15 us for 128 rows; the histograms take the table over every few
seconds, between Steps. One histogram fades slowly and one fast, so that traffic of another kind is soon most of it;
plans are chosen from either. Traffic after a choice is also recorded in a few short periods of its own, so that it is
judged by needs that it was not chosen with. Another histogram has what no file has yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.shapes.rectangular_launches import RowNeed
from trencadis.core.shapes.shape_need_histogram import (
    HALF_LIFE_SECONDS,
    MAX_CELLS,
    NeedCell,
    NeedHistogram,
    list_needs,
    round_need,
)

PERIODS = 6
"""Periods of traffic by which a proposal is judged."""

PERIOD_SECONDS = 300.0
PERIOD_CELLS = 170
UNSAVED_CELLS = 1024
RECENT_CELLS = 512
LASTING_CELLS = MAX_CELLS - PERIODS * PERIOD_CELLS - UNSAVED_CELLS - RECENT_CELLS

RECENT_SECONDS = 1800.0
"""Half-life of the needs that fade fast, unless all needs do."""

IDLE_SECONDS = 1.0
"""A longer gap between two steps is not load: the weights of needs do not fade in it."""

COLLECT_SECONDS = 5.0
"""Seconds of load after which the histograms take over what Steps have counted."""

MOST_COUNTS = 512
"""Different needs that are counted before the histograms take them over in any case."""


class NeedSnapshot(NamedTuple):
    """What has been recorded: cells and weights that no longer change, steps, and seconds of load."""

    cells: list[NeedCell]
    steps: int
    seconds: float


class NeedRecorder:
    """Counts the needs of a rank's Steps. The rank's thread writes, the engine's thread reads.

    Args:
        plan: gives the policy and the largest sizes, by which needs are cut; its buckets do not matter.
        half_life: seconds of load after which a need counts half.
    """

    def __init__(
        self, plan: Plan, half_life: float = HALF_LIFE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.plan, self.half_life = plan, half_life
        self.steps, self.seconds = 0, 0.0
        self._clock, self._last = clock, clock()
        self._block = max(plan.block_size, 1)
        self._most_blocks = 0 if plan.policy.mixed else max(plan.sizes(Stage.DECODE, 1), default=0)
        self._counts: dict[tuple[Stage, tuple[int, ...], str], int] = {}
        self._collected = 0.0
        self._lasting = NeedHistogram(half_life, LASTING_CELLS)
        self._recent = NeedHistogram(min(half_life, RECENT_SECONDS), RECENT_CELLS)
        self._unsaved = NeedHistogram(half_life, UNSAVED_CELLS)
        self._periods: list[NeedHistogram] = []
        self._period_seconds = 0.0
        self._judging = False
        self._lock = threading.Lock()

    def count(self, rows: Sequence[RowNeed], images: Sequence[int], variant: str = "", image_variant: str = "") -> None:
        """Counts the needs of one Step: its rows, and the slots of each image that it encodes.

        Args:
            variant: that of the Step's text launches, e.g. of rows with adapters; ``image_variant``: that of its VISION
                launch.
        """
        blocks = [n.context // self._block for n in rows if n.tokens == 1]
        alone, total = len(blocks), sum(blocks) + len(blocks)
        if not alone or (self._most_blocks and total > self._most_blocks):
            self._add(list_needs(rows, images, self.plan), variant, image_variant)
            return
        others = [n for n in rows if n.tokens != 1] if alone < len(rows) else ()
        needs = list(list_needs(others, images, self.plan)) if others or images else []
        self._add([*needs, Bucket(Stage.DECODE, (alone, total))], variant, image_variant)

    def count_ragged(
        self, tokens: int, rows: int, images: Sequence[int], variant: str = "", image_variant: str = ""
    ) -> None:
        """Counts the needs of one Step of a device whose launches hold all rows."""
        found = list(list_needs((), images, self.plan)) if images else []
        if rows:
            mixed = Bucket(Stage.PREFILL, (tokens, rows))
            found.append(Bucket(Stage.DECODE, (rows,)) if tokens == rows else mixed)
        self._add(found, variant, image_variant)

    def _add(self, needs: Iterable[Bucket], variant: str, image_variant: str) -> None:
        keys = [
            (n.stage, round_need(n.stage, n.dims), image_variant if n.stage is Stage.VISION else variant) for n in needs
        ]
        if not keys:
            return
        now = self._clock()
        with self._lock:
            self.steps, self.seconds = self.steps + 1, self.seconds + min(max(now - self._last, 0.0), IDLE_SECONDS)
            self._last = now
            counts = self._counts
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
            if len(counts) >= MOST_COUNTS:
                self._collect()

    def collect(self) -> None:
        """Lets the histograms take over what Steps have counted, once in ``COLLECT_SECONDS`` of load."""
        if self.seconds - self._collected >= COLLECT_SECONDS:
            with self._lock:
                self._collect()

    def _collect(self) -> None:
        """Adds the counts to the histograms; the caller holds the lock."""
        seconds, self._collected = self.seconds - self._collected, self.seconds
        counts, self._counts = self._counts, {}
        self._lasting.advance(seconds)
        self._recent.advance(seconds)
        if self._judging:
            self._advance_period(seconds)
        periods = self._periods[-1:] if self._judging else []
        for histogram in (self._lasting, self._recent, self._unsaved, *periods):
            for (stage, dims, variant), count in counts.items():
                histogram.add(stage, dims, float(count), variant)

    def _advance_period(self, seconds: float) -> None:
        """Begins the next period, or ends the recording of periods, once the present one is over."""
        self._period_seconds += seconds
        if self._period_seconds < PERIOD_SECONDS:
            return
        self._period_seconds = 0.0
        if len(self._periods) < PERIODS:
            self._periods.append(NeedHistogram(most=PERIOD_CELLS))
        else:
            self._judging = False

    def begin_periods(self) -> None:
        """Records the following traffic in periods of its own as well."""
        with self._lock:
            self._collect()
            self._periods = [NeedHistogram(most=PERIOD_CELLS)]
            self._period_seconds, self._judging = 0.0, True

    def take_periods(self) -> list[NeedHistogram] | None:
        """Returns the periods once all of them have passed, and records none from then on; None before that."""
        with self._lock:
            self._collect()
            if self._judging or not self._periods:
                return None
            taken, self._periods = self._periods, []
            return taken

    def snapshot(self, recent: bool = False) -> NeedSnapshot:
        """Returns the cells as they weigh now; ``recent``: of the needs that fade fast."""
        with self._lock:
            self._collect()
            cells = (self._recent if recent else self._lasting).list_cells()
            return NeedSnapshot(cells, self.steps, self.seconds)

    def take_unsaved(self, least: float) -> NeedHistogram:
        """Returns the needs since the last call, without cells below ``least``, which are kept until they reach it."""
        with self._lock:
            self._collect()
            taken = NeedHistogram()
            for (stage, variant), cells in self._unsaved.cells.items():
                for dims in [d for d, weight in cells.items() if weight >= least]:
                    taken.add(stage, dims, cells.pop(dims), variant)
            return taken

    def return_unsaved(self, needs: NeedHistogram) -> None:
        """Takes back what ``take_unsaved`` returned, since it could not be saved."""
        with self._lock:
            self._unsaved.merge(needs)

    def add(self, needs: NeedHistogram) -> None:
        """Adds what an earlier server recorded."""
        with self._lock:
            self._lasting.merge(needs)
