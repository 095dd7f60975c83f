"""The total order of sequences (priority, arrival, key), and the order of those with media. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.scheduling.fair_order import FairOrder
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import MediaStart, Sequence


class TotalOrder:
    """Orders admission, packing, preemption and arena rows. With priorities the order changes over time."""

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self.moves = limits.by_priority
        self.fair = FairOrder(limits.max_rows, clock) if limits.fair else None
        self._aging, self._clock, self._cached = limits.aging, clock, limits.caching

    def key(self, seq: Sequence) -> tuple[float, float, int]:
        """Returns the sort key; with priorities, a sequence rises one level for every ``aging`` seconds of age."""
        level = 0.0 if self.fair is None else self.fair.virtual_start(seq)
        if self.moves:
            level = seq.request.priority - (self._clock() - seq.arrived) // self._aging
        return (level, seq.request.arrival, seq.key)

    def insert(self, seq: Sequence, into: list[Sequence]) -> None:
        """Inserts ``seq`` at its position."""
        insort(into, seq, key=self.key)

    def start(self, seq: Sequence, running: list[Sequence]) -> None:
        """Adds ``seq`` to the running sequences."""
        if self.fair is not None:
            self.fair.note_started(seq)
        self.insert(seq, running)

    def choose_displaced(self, running: list[Sequence]) -> list[Sequence]:
        """Returns the running sequences to preempt for tenants below their share."""
        return self.fair.choose_displaced(running) if self.fair is not None and self._cached else []

    def stop(self, seq: Sequence, running: list[Sequence]) -> None:
        """Removes ``seq`` from the running sequences."""
        running.remove(seq)
        if self.fair is not None:
            self.fair.note_stopped(seq)

    def remove(self, seq: Sequence, of: list[Sequence]) -> None:
        """Removes ``seq`` from a list if it is in it."""
        if self.fair is not None and seq.virtual_start is None:
            return  # it was never queued, and computing its virtual start would charge its tenant
        at = bisect_left(of, self.key(seq), key=self.key) if not self.moves else len(of)
        if at < len(of) and of[at] is seq:
            del of[at]
        elif seq in of:
            of.remove(seq)

    def sort(self, sequences: list[Sequence]) -> None:
        """Sorts sequences again if their order may have changed."""
        if self.moves:
            sequences.sort(key=self.key)


def media_order(
    running: Iterable[Sequence],
    waiting: Iterable[Sequence],
    limits: SchedulerLimits,
    pool: BlockPool,
    hits: Callable[[Sequence], list[int]],
) -> Iterator[MediaStart]:
    """Yields sequences with media, with the token from which these are needed.

    ``hits``: finds the cached blocks that a sequence would begin with.
    """
    for seq in running:
        if seq.request.spans:
            yield MediaStart(seq, seq.computed)
    for seq in waiting:
        if seq.request.spans:
            yield MediaStart(seq, _media_start(seq, limits, pool, hits))


def _media_start(seq: Sequence, limits: SchedulerLimits, pool: BlockPool, hits: Callable[[Sequence], list[int]]) -> int:
    """Returns the token from which the media of a waiting sequence are needed: 0, or the end of its prefix hits.

    This runs for the start of the queue in every step, so one look-up decides most cases: unless the block in which the
    first image ends is cached, all media are needed.
    """
    size, first = limits.block_size, seq.request.spans[0]
    at = (first.end - 1) // size
    if not limits.caching or at >= (seq.count_known() - 1) // size:
        return 0
    return _start_after_hits(seq, at, limits, pool, hits)


def _start_after_hits(
    seq: Sequence, at: int, limits: SchedulerLimits, pool: BlockPool, hits: Callable[[Sequence], list[int]]
) -> int:
    """Returns ``_media_start`` if it depends on block ``at``."""
    size = limits.block_size
    seq.block_hashes.extend(seq.tokens, (at + 1) * size)
    key = seq.block_hashes.keys[at]
    cached = pool.find(key) is not None or pool.on_host(key)
    return len(hits(seq)) * size if cached else 0
