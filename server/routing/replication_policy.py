"""Decides when a prefix that some replicas hold is copied to one more replica (ski-rental rule).

Ski-rental rule: a prefix is copied to another replica once waiting for it has cost as much as recomputing it. A request
that waits longer at a holder than it would elsewhere adds the difference to the content's account; once the account
reaches the cost of computing the content again, the next request goes elsewhere and computes it. So copies follow the
demand without a known request rate, and waits and copies together cost at most twice what the best choice in hindsight
would.
"""

from __future__ import annotations

from collections import OrderedDict

from trencadis.server.routing.request_cost import Key

MAX_TRACKED = 1 << 14
"""Most tracked contents; the one that was waited for longest ago is dropped first."""


class ReplicationPolicy:
    """Decides when content is worth recomputing on another replica. Sums, per content, the extra seconds that
    requests have waited for it since its last copy.
    """

    def __init__(self, bound: int = MAX_TRACKED) -> None:
        self.bound = max(bound, 1)
        self._waited: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        """Number of tracked contents."""
        return len(self._waited)

    def should_replicate(self, key: Key, seconds: float, price: float) -> bool:
        """Adds ``seconds`` of extra waiting to ``key``; True, and the sum is reset, once it reaches ``price``, the
        cost of a copy in seconds.
        """
        total = self._waited.pop(key, 0.0) + seconds
        if total >= price:
            return True
        self._waited[key] = total
        if len(self._waited) > self.bound:
            self._waited.popitem(last=False)
        return False
