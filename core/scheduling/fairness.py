"""Shares by weight: the place of a choice in the order is the virtual time at which its tenant is served.

A place is fixed when it is first asked for, so the order is total and does not change, as the scheduler's progress
needs it. The API process orders by the same virtual time whose request is prepared next (``server.tenants.turns``).
"""

from __future__ import annotations

from collections.abc import Collection
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


class VirtualTime:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): service starts at the later of the virtual time now and
    the end of its tenant's service before it, and ends its cost divided by the tenant's weight later.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: dict[str, float] = {}

    def place(self, tenant: str, cost: float, weight: float) -> float:
        """The start of service that costs ``cost``; the tenant's next one starts behind it."""
        start = max(self.now, self.ends.get(tenant, 0.0))
        self.ends[tenant] = start + cost / weight
        return start

    def served(self, place: float) -> None:
        """Service that starts at ``place`` begins: time is there now, unless it is later already."""
        self.now = max(self.now, place)

    def settle(self, tenant: str, cost: float, weight: float) -> None:
        """Service cost so much more than its place was made for, or less."""
        self.ends[tenant] = self.ends.get(tenant, self.now) + cost / weight

    def forget(self) -> bool:
        """Drops tenants that have nothing to wait for, once there are many; whether it did."""
        if len(self.ends) <= MOST_IDLE:
            return False
        self.ends = {tenant: end for tenant, end in self.ends.items() if end > self.now}
        return True


class FairQueue:
    """The virtual time of the scheduler, whose costs are tokens that must be computed.

    By order alone a flood takes every row, and the next request of another tenant waits until an answer ends. So
    the last rows are kept for others, as long as one of them was served lately; alone, a tenant has them all.

    Args:
        rows: most choices that run at a time.
    """

    def __init__(self, rows: int = 1) -> None:
        self._rows, self._kept = rows, max(rows // KEPT_FREE, 1) if rows > 3 else 0
        self._starts = 0
        self._last: tuple[str, int] = ("", -LATELY)
        self._other = -LATELY
        self._time = VirtualTime()
        self._answers: dict[str, float] = {}

    def place(self, seq: Sequence) -> float:
        """The virtual time at which ``seq`` is served; the first call fixes it."""
        if seq.place is None:
            request = seq.request
            answer = min(seq.limit, self._answers.get(request.tenant, FIRST_GUESS))
            prompt = len(request.tokens) if seq.index == 0 else 0
            seq.charged = prompt + answer
            seq.place = self._time.place(request.tenant, seq.charged, request.weight)
        return seq.place

    def started(self, seq: Sequence) -> None:
        """``seq`` runs: virtual time is its place, unless it is later already."""
        self._time.served(self.place(seq))
        tenant = seq.request.tenant
        if tenant != self._last[0]:
            self._other = self._last[1]
        self._starts += 1
        self._last = (tenant, self._starts)

    def reserves(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Whether the rows that are free are kept from ``seq``."""
        free = self._rows - len(running)
        if free > self._kept or not running:
            return False
        tenant = seq.request.tenant
        other = self._last[1] if tenant != self._last[0] else self._other
        if self._starts - other >= LATELY:
            return False
        return 2 * sum(r.request.tenant == tenant for r in running) >= self._rows

    def ended(self, seq: Sequence) -> None:
        """``seq`` has ended: its tenant is charged what it really cost, and longer or shorter answers are expected."""
        if seq.place is None:
            return
        tenant, answer = seq.request.tenant, float(seq.known() - seq.prompt)
        computed = max(len(seq.request.tokens) - seq.stats.cached_tokens, 0) if seq.index == 0 else 0
        self._time.settle(tenant, computed + answer - seq.charged, seq.request.weight)
        before = self._answers.get(tenant)
        self._answers[tenant] = answer if before is None else before + RECENT * (answer - before)
        if self._time.forget():
            self._answers = {t: n for t, n in self._answers.items() if t in self._time.ends}
