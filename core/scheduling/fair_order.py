"""Weighted fair scheduling: sequences are ordered by the virtual time at which their tenant is served.

That time is fixed when it is first computed, so the order is total and does not change, as the scheduler's progress
needs it. The API process orders by the same virtual time whose request is prepared next (``tenants.fair_queue``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trencadis.core.scheduling.sequence import Sequence

FIRST_GUESS = 256.0
"""Tokens that an answer is expected to have before its tenant has had one."""

RECENT = 0.1
"""Weight of the newest answer in the expected length of the next."""

MOST_IDLE = 4096
"""Tenants that are remembered without having anything to wait for."""

KEPT_FREE = 16
"""One row of so many is kept from the tenant that runs half of them, while others come too."""

LATELY = 512
"""Starts of choices for which a tenant counts as one that comes."""

COMES_BACK = 0.1
"""Seconds for which a row is kept for the tenant whose choice has ended: clients that talk ask again when they have
been answered, and to read, prepare and send a request takes tens of milliseconds."""


class VirtualTime:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): service starts at the later of the virtual time now and
    the end of its tenant's service before it, and ends its cost divided by the tenant's weight later.
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
        """Advances the virtual time to ``start``; it never goes back."""
        self.now = max(self.now, start)

    def settle(self, tenant: str, cost: float, weight: float) -> None:
        """Corrects a tenant's virtual time by the difference between estimated and real cost."""
        self.ends[tenant] = self.ends.get(tenant, self.now) + cost / weight

    def forget(self) -> bool:
        """Drops tenants that have nothing to wait for, once there are many; whether it did."""
        if len(self.ends) <= MOST_IDLE:
            return False
        self.ends = {tenant: end for tenant, end in self.ends.items() if end > self.now}
        return True


@dataclass(slots=True)
class TenantRows:
    """The choices of a tenant.

    Args:
        coming: rows that it has left and may take again soon.
    """

    weight: float
    running: int = 0
    waiting: int = 0
    coming: int = 0


class RowShares:
    """Counts each tenant's running and waiting rows and derives who is below or above its weighted share.

    A share is one of ``rows``, among the tenants that have choices here.
    """

    def __init__(self, rows: int) -> None:
        self.used = 0
        """Rows of all tenants."""
        self._rows, self._of = rows, dict[str, TenantRows]()
        self._weights: float | None = None
        self._claims: dict[str, int] | None = None

    def count(self, tenant: str, weight: float = 0.0, *, running: int = 0, waiting: int = 0, coming: int = 0) -> None:
        """So many more; ``weight`` 0: as before."""
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
        """Rows of ``tenant``."""
        found = self._of.get(tenant)
        return 0 if found is None else found.running

    def claims(self) -> dict[str, int]:
        """How many rows tenants wait for that ask for no more than their share in all."""
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
        """Whether ``tenant`` runs its share and a row more even ``without`` some."""
        mine = self._of[tenant]
        left = mine.running - sum(seq.request.tenant == tenant for seq in without) - 1
        return left * self._weight() >= self._rows * mine.weight

    def _weight(self) -> float:
        """Of all tenants that have choices here."""
        if self._weights is None:
            self._weights = sum(one.weight for one in self._of.values())
        return self._weights


class FairOrder:
    """Fair scheduling policy of the scheduler: order by virtual time, and rows reserved for tenants below their share.

    By order alone a flood takes every row, and the next request of another tenant waits until an answer ends. So
    the last rows are kept for others, as long as one of them was served lately; alone, a tenant has them all. A tenant
    that asks for no more than its share of the rows gets them at once: rows that it has just left are kept from others
    that have their share, and if these have more, the last of them wait again.

    Args:
        rows: most choices that run at a time.
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
        """When a choice of which tenant has left its row, for rows that this tenant has not taken again; oldest first.
        """

    def virtual_start(self, seq: Sequence) -> float:
        """The virtual time at which ``seq`` is served; the first call fixes it."""
        if seq.virtual_start is None:
            request = seq.request
            answer = min(seq.limit, self._answers.get(request.tenant, FIRST_GUESS))
            prompt = len(request.tokens) if seq.index == 0 else 0
            seq.charged = prompt + answer
            seq.virtual_start = self._time.schedule_service(request.tenant, seq.charged, request.weight)
            self._shares.count(request.tenant, request.weight, waiting=1)
        return seq.virtual_start

    def note_started(self, seq: Sequence) -> None:
        """``seq`` runs: virtual time is its place, unless it is later already."""
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
        """``seq`` no longer runs; if it has not ended, it waits again."""
        if seq.ended:
            self._ended.append((self._clock(), seq.request.tenant))
        self._shares.count(
            seq.request.tenant, seq.request.weight, running=-1, waiting=not seq.ended, coming=int(seq.ended)
        )

    def keeps_rows_from(self, seq: Sequence) -> bool:
        """Whether the rows that are free are kept from ``seq``."""
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
        """Whether ``tenant`` runs half of the rows, and another was served lately."""
        other = self._last[1] if tenant != self._last[0] else self._other
        return self._starts - other < LATELY and 2 * self._shares.running(tenant) >= self._rows

    def find_other(self, waiting: List[Sequence], at: int) -> int:
        """Returns the index of a waiting sequence that may start although rows are reserved from ``waiting[at]``; its
        length if there is none.

        Unless its tenant asks for no more than its share, its place must be within the service of that one, so that
        no tenant gains more than that.
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

        Only one that has begun its answer, so that all it has computed can be found in the prefix cache, and each only
        once, so that it comes to its end.
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
        """``seq`` has ended: its tenant is charged what it really cost, and longer or shorter answers are expected."""
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
