"""Addresses in the card's memory: tensors and graphs from the low end, one workspace at the high end.

Works as the plug-in's pool does: a request takes the smallest hole that is large enough, neighbouring holes are joined,
and the workspace grows into the hole below it. Where no hole is large enough, everything is moved together, which waits
for the card and is counted; ``PT_ENABLE_MEMORY_DEFRAGMENTATION=0`` forbids that.
"""

from __future__ import annotations

ALIGNMENT = 128
"""Every piece is rounded up to a multiple of this many bytes."""


class AddressSpace:
    """Pieces of memory, identified by numbers.

    Args:
        moves: True if pieces may be moved together (defragmentation).
    """

    def __init__(self, total: int, moves: bool = True) -> None:
        self.total, self.moves = total // ALIGNMENT * ALIGNMENT, moves
        self.defragmentations = 0
        self._holes: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._pieces: dict[int, tuple[int, int]] = {}
        self._last = 0
        self._floor = self.total
        """Address at which the workspace begins."""
        if self.total:
            self._add(0, self.total)

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return max(self._holes.values(), default=0)

    def allocate(self, count: int) -> int | None:
        """Allocates ``count`` bytes and returns the number of the piece; None where no hole is large enough."""
        size = _align_up(count)
        found = self._smallest(size)
        if found is None and self._gather(size, self.total):
            found = self._smallest(size)
        if found is None:
            return None
        held = self._remove(found)
        if held > size:
            self._add(found + size, held - size)
        self._last += 1
        self._pieces[self._last] = (found, size)
        return self._last

    def release(self, piece: int) -> None:
        """Frees a piece that ``allocate`` returned."""
        at, size = self._pieces.pop(piece)
        before = self._ends.get(at)
        if before is not None:
            at, size = before, size + self._remove(before)
        if at + size in self._holes:
            size += self._remove(at + size)
        self._add(at, size)

    def extend(self, count: int) -> bool:
        """Grows the workspace to ``count`` bytes; returns False if the hole below it is too small for the
        difference.
        """
        more = _align_up(count) - (self.total - self._floor)
        if more <= 0:
            return True
        if self._below() < more and (not self._gather(more, self._floor) or self._below() < more):
            return False
        at = self._ends[self._floor]
        held = self._remove(at)
        self._floor -= more
        if held > more:
            self._add(at, held - more)
        return True

    def _below(self) -> int:
        at = self._ends.get(self._floor)
        return 0 if at is None else self._holes[at]

    def _smallest(self, size: int) -> int | None:
        found = min(((n, at) for at, n in self._holes.items() if n >= size), default=None)
        return None if found is None else found[1]

    def _gather(self, size: int, end: int) -> bool:
        """Moves all pieces to the low end, if that makes room for ``size``; the workspace stays."""
        if not self.moves or sum(self._holes.values()) < size:
            return False
        self.defragmentations += 1
        at = 0
        for piece, (_, held) in sorted(self._pieces.items(), key=lambda item: item[1]):
            self._pieces[piece] = (at, held)
            at += held
        self._holes, self._ends = {}, {}
        if self._floor > at:
            self._add(at, self._floor - at)
        return at + size <= end

    def _add(self, at: int, size: int) -> None:
        self._holes[at] = size
        self._ends[at + size] = at

    def _remove(self, at: int) -> int:
        size = self._holes.pop(at)
        del self._ends[at + size]
        return size


def _align_up(count: int) -> int:
    """Rounds up to whole units of ``ALIGNMENT``; at least one, so that every piece has an address of its own."""
    return max(-(-count // ALIGNMENT), 1) * ALIGNMENT
