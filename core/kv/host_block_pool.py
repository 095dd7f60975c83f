"""Host memory tier of the block pool: keeps the content of evicted blocks under its key. Pure Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from trencadis.core.step import BlockMove


class HostBlockPool:
    """Manages slots [0, size) of host memory, one block each; the least recently used is overwritten first.

    ``moves`` lists copies in the order in which they must run, before the launches of the next Step: a block may be
    reused as soon as it is evicted, and a slot as soon as it is read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.moves: list[BlockMove] = []
        self.stored = 0
        self.restored = 0
        self.evictions = 0
        self._free = list(range(size - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    @property
    def used(self) -> int:
        """Number of slots that hold content."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def keep(self, key: bytes, block: int) -> None:
        """Stores the content ``key`` of an evicted block; makes no copy if it is stored already."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        if not self._free:
            if not self._slots:
                return  # all slots are being read
            self._free.append(self._slots.popitem(last=False)[1])
            self.evictions += 1
        slot = self._slots[key] = self._free.pop()
        self.moves.append(BlockMove(block, slot, True))
        self.stored += 1

    def pull(self, keys: Sequence[bytes]) -> list[int]:
        """Removes ``keys`` from the pool and returns their slots, so that evictions meanwhile do not overwrite them."""
        return [self._slots.pop(key) for key in keys]

    def restore(self, key: bytes, slot: int, block: int) -> None:
        """Copies a pulled slot to ``block``; the content stays stored as the most recently used."""
        self.moves.append(BlockMove(block, slot, False))
        self._slots[key] = slot
        self.restored += 1

    def take_moves(self) -> tuple[BlockMove, ...]:
        """Returns the copies that the next Step begins with, and clears the list."""
        moves, self.moves = tuple(self.moves), []
        return moves

    def forget(self) -> None:
        """Drops all content. Copies already listed still run, but their results are never read."""
        self._free.extend(self._slots.values())
        self._slots.clear()

    def check(self) -> None:
        """Asserts that every slot is free or holds one content."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.size)), "a slot of host memory is lost"
