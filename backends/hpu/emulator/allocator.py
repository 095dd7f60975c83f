"""The emulated device's memory in bytes: who uses it, at which addresses, and how much is left."""

from __future__ import annotations

from typing import Any

import torch

from trencadis.backends.hpu.emulator.address_space import AddressSpace
from trencadis.backends.hpu.emulator.card_profiles import Profile
from trencadis.backends.hpu.emulator.refusals import EmulatedOutOfMemory

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

    def add(self, count: int) -> None:
        self.now += count
        self.fresh += count
        self.peak = max(self.peak, self.now)

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
