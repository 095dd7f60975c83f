"""The emulated device's memory in bytes: who uses it, at which addresses, and how much is left.

Tensors and graphs are taken from the low end, one workspace from the high end, as the plug-in's pool does: a request
takes the smallest hole that is large enough, neighbouring holes are joined, and the workspace grows into the hole below
it. Where no hole is large enough, everything is moved together, which waits for the card and is counted;
``PT_ENABLE_MEMORY_DEFRAGMENTATION=0`` forbids that.
"""

from __future__ import annotations

from typing import Any

import torch

from trencadis.backends.hpu.emulator.card_profiles_and_op_support import Profile
from trencadis.backends.hpu.emulator.emulated_errors import EmulatedOutOfMemory

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


KINDS = ("tensors", "graphs", "workspace", "not returned")


class Allocator:
    """Bytes by kind: tensors (unique storages), graphs (tensors that they keep), one workspace, and bytes not given
    back.
    """

    def __init__(self, profile: Profile) -> None:
        self.total = profile.total
        self.pool = AddressSpace(profile.total, profile.moves)
        self.used = dict.fromkeys(KINDS, 0)
        self._pieces: dict[tuple[str, int], list[int]] = {}

    @property
    def free(self) -> int:
        """Bytes that can still be allocated, if they are contiguous."""
        return self.total - sum(self.used.values())

    def allocate(self, kind: str, count: int, what: str = "") -> int:
        """Charges ``count`` bytes and returns their piece; raises EmulatedOutOfMemory where no piece holds them."""
        at = self.pool.allocate(count) if count <= self.free else None
        if at is None:
            raise EmulatedOutOfMemory(count, self.free, what or kind, self.pool.largest)
        self.used[kind] += count
        self._pieces.setdefault((kind, count), []).append(at)
        return at

    def reserve(self, count: int) -> None:
        """Reserves bytes of KV blocks that have no real memory, permanently."""
        self.allocate("tensors", count, "KV blocks that nothing backs")

    def release(self, kind: str, count: int, piece: int | None = None) -> None:
        """Frees a piece of ``count`` bytes; None: any piece of that size."""
        self.used[kind] -= count
        held = self._pieces[kind, count]
        found = held[-1] if piece is None else piece
        held.remove(found)
        self.pool.release(found)

    def grow_workspace(self, need: int) -> None:
        """Grows the workspace to at least ``need`` bytes. All launches share it, and it never shrinks.

        Raises:
            EmulatedOutOfMemory: the free memory below it is too small.
        """
        more = need - self.used["workspace"]
        if more <= 0:
            return
        if more > self.free or not self.pool.extend(need):
            text = f"a workspace of {need} bytes"
            raise EmulatedOutOfMemory(more, self.free, text, self.pool.largest, workspace=True)
        self.used["workspace"] += more


class LiveBytes:
    """Bytes of a launch's own tensors: current, peak, and those that a graph of the launch would keep.

    A graph keeps what crosses a cut, each tensor once: the outputs of its recipes that something still holds then.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.cuts = 0
        self.fresh = 0
        """Bytes of live tensors that were made since the last cut."""
        self.kept = 0
        self.held = 0
        """Bytes of the results of compiled graphs, which stay until the card has run the launch."""

    def add(self, count: int) -> None:
        self.now += count
        self.fresh += count
        self.peak = max(self.peak, self.now)

    def hold(self, count: int) -> None:
        """Counts results of a compiled graph: the plug-in keeps the tensors of a recipe until it has run."""
        self.held += count

    def drop(self, count: int, born: int) -> None:
        """Subtracts a freed tensor that was made after ``born`` cuts."""
        self.now -= count
        if born == self.cuts:
            self.fresh -= count

    def cut(self) -> None:
        """Marks all live bytes as kept by the graph, and counts the cut."""
        self.kept += self.fresh
        self.fresh = 0
        self.cuts += 1


class Store:
    """One storage on the device, shared by all views of it; its bytes are freed when the last of them is gone.

    Args:
        live: the launch whose workspace holds it; None: it is allocated by itself.
    """

    def __init__(self, allocator: Allocator, count: int, live: LiveBytes | None) -> None:
        self.piece = allocator.allocate("tensors", count, f"a tensor of {count} bytes") if live is None else None
        if live is not None:
            live.add(count)
        self.allocator, self.bytes, self.live = allocator, count, live
        self.born = 0 if live is None else live.cuts
        self.twin: Any = None
        self.untouched = False  # True while it still holds the zeros that it was created with
        self.captured = False  # True if a graph reads it or writes to it

    def meta_storage(self) -> Any:
        """Returns a storage on torch's meta device, without values.

        Views of this storage stay views of each other there.
        """
        if self.twin is None:
            self.twin = torch.empty(self.bytes, dtype=torch.uint8, device="meta").untyped_storage()
        return self.twin

    def keep(self) -> None:
        """Moves the storage out of the launch's workspace into its graph, which is charged for it."""
        if self.live is not None:
            self.live.drop(self.bytes, self.born)
            self.live = None
            self.bytes = 0

    def __del__(self) -> None:
        if not hasattr(self, "live"):
            return
        if self.live is not None:
            self.live.drop(self.bytes, self.born)
        elif self.piece is not None:
            self.allocator.release("tensors", self.bytes, self.piece)
