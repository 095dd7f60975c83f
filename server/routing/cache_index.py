"""Index of the replicas that hold each content, as far as the router knows. Bounded; the least recently used goes
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from trencadis.server.routing.request_cost import Key


class CacheIndex:
    """Maps keys of cached content to the replicas that hold them.

    Each replica has a list of its own in the order of use, at most ``bound`` long. A cache evicts in about that order,
    so the list is right for most keys even if no engine reports evictions.
    """

    def __init__(self, bound: int) -> None:
        self.bound = max(bound, 1)
        self._holders: dict[Key, list[int]] = {}
        self._held: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        """Number of pairs of a key and a holder."""
        return sum(len(held) for held in self._held.values())

    def get_holders(self, key: Key) -> Sequence[int]:
        """Returns the replicas that hold ``key``; the result must not be changed."""
        return self._holders.get(key, ())

    def holds(self, replica: int, key: Key) -> bool:
        """Returns True if ``replica`` holds ``key``."""
        held = self._held.get(replica)
        return held is not None and key in held

    def mark_used(self, replica: int, keys: Iterable[Key]) -> None:
        """Records that ``replica`` holds ``keys`` (or will, once it has run the request); the last key becomes the
        most recent.
        """
        held = self._held.get(replica)
        if held is None:
            held = self._held[replica] = OrderedDict()
        for key in keys:
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
                self._holders.setdefault(key, []).append(replica)
        while len(held) > self.bound:
            self._remove_holder(replica, held.popitem(last=False)[0])

    def remove_evicted(self, replica: int, keys: Iterable[Key]) -> None:
        """Records that ``replica`` no longer holds ``keys``; keys that it was not known to hold are ignored."""
        held = self._held.get(replica)
        if not held:
            return
        for key in keys:
            if key in held:
                del held[key]
                self._remove_holder(replica, key)

    def forget(self, replica: int) -> None:
        """Records that ``replica`` holds nothing any more."""
        for key in self._held.pop(replica, ()):
            self._remove_holder(replica, key)

    def _remove_holder(self, replica: int, key: Key) -> None:
        holders = self._holders[key]
        holders.remove(replica)
        if not holders:
            del self._holders[key]

    def check(self) -> None:
        """Asserts that both directions of the index agree and that the bound is kept."""
        pairs = {(key, r) for key, holders in self._holders.items() for r in holders}
        assert pairs == {(key, r) for r, held in self._held.items() for key in held}, "the two directions differ"
        assert len(pairs) == sum(len(h) for h in self._holders.values()), "a holder is listed twice"
        assert all(self._holders.values()), "a key without holders is kept"
        assert all(len(held) <= self.bound for held in self._held.values()), "the index exceeds its bound"
