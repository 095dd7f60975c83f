"""A replica's caches in the fast model: counts of blocks, and keys in the order in which they are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """KV blocks as ``core.kv.block_pool`` keeps them, without ids: those in use, idle ones with a key, free ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.own = 0
        """Blocks in use that have no key."""
        self._used: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evicted: list[int] = []
        """Keys since somebody emptied the list."""

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return self.size - self.own - len(self._used)

    def hits(self, keys: Sequence[int]) -> int:
        """How many of ``keys`` are cached, from the first on."""
        for i, key in enumerate(keys):
            if key not in self._used and key not in self._idle:
                return i
        return len(keys)

    def idle(self, keys: Sequence[int]) -> int:
        """How many of ``keys`` nobody uses."""
        return sum(key in self._idle for key in keys)

    def hold(self, keys: Sequence[int], own: int) -> None:
        """One more user of the blocks ``keys``, cached or new ones, and of ``own`` others."""
        for key in keys:
            if key in self._used:
                self._used[key] += 1
            else:
                self._idle.pop(key, None)
                self._used[key] = 1
        self.own += own
        while len(self._idle) > self.free:
            self.evicted.append(self._idle.popitem(last=False)[0])

    def drop(self, keys: Sequence[int], own: int) -> None:
        """One user less; a tail becomes evictable before its prefix."""
        self.own -= own
        for key in reversed(keys):
            left = self._used[key] - 1
            if left:
                self._used[key] = left
            else:
                del self._used[key]
                self._idle[key] = None


class ImageCache:
    """Embeddings in the order of their last use, and their rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0
        self.evicted: list[int] = []

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def use(self, key: int) -> None:
        """It is read."""
        self._held.move_to_end(key)

    def put(self, key: int, rows: int) -> None:
        """It is encoded, and takes the place of those that were used least recently."""
        while self._used + rows > self.rows and self._held:
            gone, count = self._held.popitem(last=False)
            self._used -= count
            self.evicted.append(gone)
        self._held[key] = rows
        self._used += rows
