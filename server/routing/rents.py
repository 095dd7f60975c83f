"""When one more replica should hold what others hold already: once requests have waited for as long as that costs.

It is the rule of renting or buying. A request that waits longer at a holder than it would elsewhere pays the
difference; when all of them have paid what it takes to compute the content once more, the next request goes elsewhere
and computes it. So copies follow the demand without a rate to be known, and waits and copies together cost at most
twice what the best choice in hindsight would.
"""

from __future__ import annotations

from collections import OrderedDict

from trencadis.server.routing.work import Key

BOUND = 1 << 14
"""Contents with a rent that are known; the one that paid longest ago goes first."""


class Rents:
    """Seconds that were waited for each content since it was last copied."""

    def __init__(self, bound: int = BOUND) -> None:
        self.bound = max(bound, 1)
        self._paid: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        """Contents with a rent."""
        return len(self._paid)

    def paid(self, key: Key, seconds: float, price: float) -> bool:
        """A request waits ``seconds`` longer for ``key``; whether a copy for ``price`` seconds is due instead."""
        total = self._paid.pop(key, 0.0) + seconds
        if total >= price:
            return True
        self._paid[key] = total
        if len(self._paid) > self.bound:
            self._paid.popitem(last=False)
        return False
