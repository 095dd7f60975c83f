"""The total order of sequences (priority, arrival, key), weighted fair order by tenants' virtual time, and the share of
a step that prompts with log-probabilities get.

The virtual time at which a tenant is served is fixed when it is first computed, so the order is total and does not
change, as the scheduler requires for progress. The API process uses the same virtual time to order the preparation of
requests (``tenants.fair_queue``). Torch-free.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.checkpoint.decoder_layer_config import CHUNK
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import MediaStart, Sequence

FIRST_GUESS = 256.0
"""Expected length of an answer in tokens before its tenant has had one."""

RECENT = 0.1
"""Weight of the newest answer in the running mean of answer lengths."""

MOST_IDLE = 4096
"""Largest number of idle tenants whose state is kept."""

KEPT_FREE = 16
"""One row in this many is reserved from a tenant that runs half of them, while other tenants are active."""

LATELY = 512
"""Number of started choices during which a tenant counts as active."""

SCORED_SHARE = 8
"""Prompts with ``prompt_logprobs`` take at most one in this many tokens of a step."""

SCORED_SHARE_BESIDE = 32
"""The same beside other sequences, whose tokens wait until the step has ended."""

OTHERS_COME_BACK = 2.0
"""Seconds after the last sequence without ``prompt_logprobs`` for which another one is expected."""

COMES_BACK = 0.1
"""Seconds for which a row is reserved for the tenant whose choice has ended.

Clients that send requests one after another send the next one after an answer; reading, preparing and sending takes
tens of milliseconds.
"""


class VirtualTime:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996).

    A service starts at the current virtual time or at the end of its tenant's previous service, whichever is later, and
    ends later by its cost divided by the tenant's weight.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: dict[str, float] = {}

    def schedule_service(self, tenant: str, cost: float, weight: float) -> float:
        """Returns the virtual start time of service that costs ``cost`` and reserves it for the tenant."""
        start = max(self.now, self.ends.get(tenant, 0.0))
        self.ends[tenant] = start + cost / weight
        return start

    def advance_to(self, start: float) -> None:
        """Advances the virtual time to ``start``; it never decreases."""
        self.now = max(self.now, start)

    def settle(self, tenant: str, cost: float, weight: float) -> None:
        """Corrects a tenant's virtual time by the difference between estimated and real cost."""
        self.ends[tenant] = self.ends.get(tenant, self.now) + cost / weight

    def forget(self) -> bool:
        """Drops idle tenants if there are many; returns True if it did."""
        if len(self.ends) <= MOST_IDLE:
            return False
        self.ends = {tenant: end for tenant, end in self.ends.items() if end > self.now}
        return True


@dataclass(slots=True)
class TenantRows:
    """Row counts of a tenant's choices.

    Args:
        coming: rows that it has left recently and may need again soon.
    """

    weight: float
    running: int = 0
    waiting: int = 0
    coming: int = 0


class RowShares:
    """Counts each tenant's running and waiting rows and determines which tenants are below or above their weighted
    share.

    Shares divide ``rows`` among the tenants that currently have choices.
    """

    def __init__(self, rows: int) -> None:
        self.used = 0
        """Rows of all tenants."""
        self._rows, self._of = rows, dict[str, TenantRows]()
        self._weights: float | None = None
        self._claims: dict[str, int] | None = None

    def count(self, tenant: str, weight: float = 0.0, *, running: int = 0, waiting: int = 0, coming: int = 0) -> None:
        """Adds to a tenant's counts; ``weight`` 0: keep its weight."""
        found = self._of.setdefault(tenant, TenantRows(weight))
        found.weight = weight or found.weight
        found.running += running
        found.waiting += waiting
        found.coming += coming
        self.used += running
        self._weights = self._claims = None
        if not (found.running or found.waiting or found.coming):
            del self._of[tenant]

    def running(self, tenant: str) -> int:
        """Returns the number of rows that ``tenant`` runs."""
        found = self._of.get(tenant)
        return 0 if found is None else found.running

    def claims(self) -> dict[str, int]:
        """Returns the waiting rows of tenants whose running and waiting rows together do not exceed their share."""
        if self._claims is None:
            some = self._of.items() if len(self._of) > 1 else ()
            self._claims = {
                name: one.waiting
                for name, one in some
                if one.waiting and (one.running + one.waiting) * self._weight() <= self._rows * one.weight
            }
        return self._claims

    def keeps(self, tenant: str, free: int) -> bool:
        """True if the ``free`` rows are reserved for other tenants, because ``tenant`` already runs its share."""
        mine = self._of.get(tenant)
        if mine is None or len(self._of) < 2:
            return False
        if mine.running * self._weight() < self._rows * mine.weight:
            return False
        claims = self.claims()
        wanted = sum(one.coming + claims.get(name, 0) for name, one in self._of.items() if one is not mine)
        return free <= wanted

    def beyond(self, tenant: str, without: List[Sequence]) -> bool:
        """Returns True if ``tenant`` exceeds its share by at least one row even ``without`` some sequences."""
        mine = self._of[tenant]
        left = mine.running - sum(seq.request.tenant == tenant for seq in without) - 1
        return left * self._weight() >= self._rows * mine.weight

    def _weight(self) -> float:
        """Returns the total weight of all tenants that currently have choices."""
        if self._weights is None:
            self._weights = sum(one.weight for one in self._of.values())
        return self._weights


class FairOrder:
    """Fair scheduling policy of the scheduler: order by virtual time, and rows reserved for tenants below their share.

    By order alone, a burst of requests would take every row, and the next request of another tenant would wait until an
    answer ends. So the last rows are reserved for others as long as another tenant was served recently; a single tenant
    may use all rows. A tenant within its share of the rows gets them at once: rows that it has just left are reserved
    from tenants that have their share, and if these have more, their last sequences are preempted.

    Args:
        rows: largest number of concurrently running choices.
    """

    def __init__(self, rows: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows, self._kept, self._clock = rows, max(rows // KEPT_FREE, 1) if rows > 3 else 0, clock
        self._starts = 0
        self._last: tuple[str, int] = ("", -LATELY)
        self._other = -LATELY
        self._time = VirtualTime()
        self._answers: dict[str, float] = {}
        self._shares = RowShares(rows)
        self._ended: deque[tuple[float, str]] = deque()
        """(time, tenant) of each choice that has left a row which the tenant has not taken again; oldest first."""

    def virtual_start(self, seq: Sequence) -> float:
        """Returns the virtual time at which ``seq`` is served; the first call fixes it."""
        if seq.virtual_start is None:
            request = seq.request
            answer = min(seq.limit, self._answers.get(request.tenant, FIRST_GUESS))
            prompt = len(request.tokens) if seq.index == 0 else 0
            seq.charged = prompt + answer
            seq.virtual_start = self._time.schedule_service(request.tenant, seq.charged, request.weight)
            self._shares.count(request.tenant, request.weight, waiting=1)
        return seq.virtual_start

    def note_started(self, seq: Sequence) -> None:
        """Records that ``seq`` runs; virtual time advances to its start."""
        self._time.advance_to(self.virtual_start(seq))
        tenant, weight = seq.request.tenant, seq.request.weight
        if tenant != self._last[0]:
            self._other = self._last[1]
        self._starts += 1
        self._last = (tenant, self._starts)
        back = next((one for one in self._ended if one[1] == tenant), None)
        if back is not None:
            self._ended.remove(back)
        self._shares.count(tenant, weight, running=1, waiting=-1, coming=-(back is not None))

    def note_stopped(self, seq: Sequence) -> None:
        """Records that ``seq`` no longer runs; if it has not ended, it waits again."""
        if seq.ended:
            self._ended.append((self._clock(), seq.request.tenant))
        self._shares.count(
            seq.request.tenant, seq.request.weight, running=-1, waiting=not seq.ended, coming=int(seq.ended)
        )

    def keeps_rows_from(self, seq: Sequence) -> bool:
        """Returns True if the free rows are reserved from ``seq``."""
        free = self._rows - self._shares.used
        if free == self._rows:
            return False
        if free <= self._kept and self._has_half(seq.request.tenant):
            return True
        since = self._clock() - COMES_BACK
        while self._ended and self._ended[0][0] < since:
            self._shares.count(self._ended.popleft()[1], coming=-1)
        return self._shares.keeps(seq.request.tenant, free)

    def _has_half(self, tenant: str) -> bool:
        """Returns True if ``tenant`` runs half of the rows and another tenant was served recently."""
        other = self._last[1] if tenant != self._last[0] else self._other
        return self._starts - other < LATELY and 2 * self._shares.running(tenant) >= self._rows

    def find_other(self, waiting: List[Sequence], at: int) -> int:
        """Returns the index of a waiting sequence that may start although rows are reserved from ``waiting[at]``.

        Unless its tenant is within its share, it must start within the service time of ``waiting[at]``, which bounds
        the advantage of any tenant. Returns the length of ``waiting`` if there is none.
        """
        head, refused = waiting[at], {waiting[at].request.tenant}
        end, claims = self.virtual_start(head) + head.charged / head.request.weight, self._shares.claims()
        for index in range(at + 1, len(waiting)):
            seq = waiting[index]
            tenant, late = seq.request.tenant, self.virtual_start(seq) >= end
            if late and not claims:
                break
            if tenant not in refused and (tenant in claims or not late):
                if not self.keeps_rows_from(seq):
                    return index
                refused.add(tenant)
        return len(waiting)

    def choose_displaced(self, running: List[Sequence]) -> list[Sequence]:
        """Returns the running sequences to preempt, last first, for tenants below their share.

        A sequence is eligible only if it has begun its answer, so that its prompt is in the prefix cache, and only
        once, so that it finishes eventually.
        """
        wanted = sum(self._shares.claims().values()) - (self._rows - self._shares.used)
        found: list[Sequence] = []
        for seq in reversed(running) if wanted > 0 else ():
            once = not (seq.stats.preemptions or seq.mates or seq.siblings) and seq.count_known() > seq.prompt
            if once and self._shares.beyond(seq.request.tenant, found):
                seq.requeue = True
                found.append(seq)
                if len(found) == wanted:
                    break
        return found

    def note_ended(self, seq: Sequence) -> None:
        """Charges the tenant of an ended ``seq`` its real cost, and updates the expected answer length."""
        if seq.virtual_start is None:
            return
        tenant, answer = seq.request.tenant, float(seq.count_known() - seq.prompt)
        if not seq.runs:
            self._shares.count(tenant, waiting=-1)
        computed = max(len(seq.request.tokens) - seq.stats.cached_tokens, 0) if seq.index == 0 else 0
        self._time.settle(tenant, computed + answer - seq.charged, seq.request.weight)
        before = self._answers.get(tenant)
        self._answers[tenant] = answer if before is None else before + RECENT * (answer - before)
        if self._time.forget():
            self._answers = {t: n for t, n in self._answers.items() if t in self._time.ends}


class OrderKey(NamedTuple):
    """The sort key of a sequence: what is less comes first."""

    level: float  # priority, raised by age; or the tenant's virtual start
    arrival: float
    number: int


class ScoredShare:
    """Determines how many tokens of prompts with ``prompt_logprobs`` a step computes.

    Steps are short while other sequences wait or run, and for ``OTHERS_COME_BACK`` seconds after that: one that arrives
    during a step waits until it has ended, and nothing can shorten it any more.
    """

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._others, self._seen = 0, -OTHERS_COME_BACK  # running now; when the last one was queued or stopped

    def note(self, seq: Sequence, running: int) -> None:
        """Takes notice of a sequence that is queued (``running`` 0), starts (1) or stops (-1)."""
        if seq.prompt_scores is None:
            self._others += running
            self._seen = self._clock()

    def tokens(self) -> int:
        """Returns the tokens that the next step may spend on prompts with log-probabilities.

        That is no less than the chunk at whose multiples recurrent states are kept.
        """
        beside_others = self._others > 0 or self._clock() - self._seen < OTHERS_COME_BACK
        return max(self._limits.max_tokens // (SCORED_SHARE_BESIDE if beside_others else SCORED_SHARE), CHUNK)


class TotalOrder:
    """Orders admission, packing, preemption and arena rows. With priorities the order changes over time."""

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self.moves = limits.by_priority
        self.fair = FairOrder(limits.max_rows, clock) if limits.fair else None
        self.scored = ScoredShare(limits, clock)
        self._aging, self._clock, self._cached = limits.aging, clock, limits.caching

    def key(self, seq: Sequence) -> OrderKey:
        """Returns the sort key; with priorities, a sequence rises one level for every ``aging`` seconds of age."""
        level = 0.0 if self.fair is None else self.fair.virtual_start(seq)
        if self.moves:
            level = seq.request.priority - (self._clock() - seq.arrived) // self._aging
        return OrderKey(level, seq.request.arrival, seq.key)

    def insert(self, seq: Sequence, into: list[Sequence]) -> None:
        """Inserts ``seq`` at its position."""
        insort(into, seq, key=self.key)

    def enqueue(self, seq: Sequence, waiting: list[Sequence]) -> None:
        """Adds ``seq`` to the waiting sequences."""
        self.scored.note(seq, 0)
        self.insert(seq, waiting)

    def start(self, seq: Sequence, running: list[Sequence]) -> None:
        """Adds ``seq`` to the running sequences."""
        self.scored.note(seq, 1)
        if self.fair is not None:
            self.fair.note_started(seq)
        self.insert(seq, running)

    def choose_displaced(self, running: list[Sequence]) -> list[Sequence]:
        """Returns the running sequences to preempt for tenants below their share."""
        return self.fair.choose_displaced(running) if self.fair is not None and self._cached else []

    def stop(self, seq: Sequence, running: list[Sequence]) -> None:
        """Removes ``seq`` from the running sequences."""
        running.remove(seq)
        self.scored.note(seq, -1)
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
