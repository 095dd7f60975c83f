"""Decides when a prefix that some replicas hold is copied to one more replica (ski-rental rule)."""

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
