"""Shares by weight: the place of a choice in the order is the virtual time at which its tenant is served.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a choice starts at the later of the virtual time now and the end
of its tenant's choice before it, and ends its cost divided by the tenant's weight later. A place is fixed when it is
first asked for, so the order is total and does not change, as the scheduler's progress needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trencadis.core.scheduling.sequence import Sequence

FIRST_GUESS = 256.0
"""Tokens that an answer is expected to have before its tenant has had one."""

RECENT = 0.1
"""Weight of the newest answer in the expected length of the next."""

MOST_IDLE = 4096
"""Tenants without a choice that are remembered; the ends of the others lie in the past, or they are few."""


class FairQueue:
    """Virtual time, and where each tenant's service ends in it. Costs are tokens that must be computed."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: dict[str, float] = {}
        self._answers: dict[str, float] = {}

    def place(self, seq: Sequence) -> float:
        """The virtual time at which ``seq`` is served; the first call fixes it."""
        if seq.place is None:
            request = seq.request
            answer = min(seq.limit, self._answers.get(request.tenant, FIRST_GUESS))
            prompt = len(request.tokens) if seq.index == 0 else 0
            seq.charged = prompt + answer
            seq.place = max(self.now, self._ends.get(request.tenant, 0.0))
            self._ends[request.tenant] = seq.place + seq.charged / request.weight
        return seq.place

    def started(self, seq: Sequence) -> None:
        """``seq`` runs: virtual time is its place, unless it is later already."""
        self.now = max(self.now, self.place(seq))

    def ended(self, seq: Sequence) -> None:
        """``seq`` has ended: its tenant is charged what it really cost, and longer or shorter answers are expected."""
        if seq.place is None:
            return
        tenant, answer = seq.request.tenant, float(seq.known() - seq.prompt)
        computed = max(len(seq.request.tokens) - seq.stats.cached_tokens, 0) if seq.index == 0 else 0
        self._ends[tenant] += (computed + answer - seq.charged) / seq.request.weight
        before = self._answers.get(tenant)
        self._answers[tenant] = answer if before is None else before + RECENT * (answer - before)
        if len(self._ends) > MOST_IDLE:
            self._ends = {t: end for t, end in self._ends.items() if end > self.now}
            self._answers = {t: n for t, n in self._answers.items() if t in self._ends}
