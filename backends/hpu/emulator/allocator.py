"""The emulated device's memory in bytes: who holds what, and what is left."""

from __future__ import annotations

from typing import Any

import torch

from trencadis.backends.hpu.emulator.profiles import Profile
from trencadis.backends.hpu.emulator.refusals import EmulatedOutOfMemory

KINDS = ("tensors", "graphs", "workspace", "not returned")


class Allocator:
    """Bytes by kind: tensors (unique storages), graphs (outputs and code), one workspace, what releases kept."""

    def __init__(self, profile: Profile) -> None:
        self.total = profile.total
        self.used = dict.fromkeys(KINDS, 0)

    @property
    def free(self) -> int:
        """Bytes that can still be taken."""
        return self.total - sum(self.used.values())

    def take(self, kind: str, count: int, what: str = "") -> None:
        """Charges ``count`` bytes; raises EmulatedOutOfMemory where they are not there."""
        if count > self.free:
            raise EmulatedOutOfMemory(count, self.free, what or kind)
        self.used[kind] += count

    def give(self, kind: str, count: int) -> None:
        """Returns ``count`` bytes."""
        self.used[kind] -= count

    def grow_workspace(self, need: int) -> None:
        """The workspace is shared by all launches and never shrinks."""
        more = need - self.used["workspace"]
        if more > 0:
            self.take("workspace", more, f"a workspace of {need} bytes")


class Live:
    """Bytes of a launch's own tensors: now, and at their most."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


class Store:
    """One storage on the device, shared by all views of it; its bytes go back when the last of them is gone.

    Args:
        live: the launch whose workspace holds it; None: a tensor of its own.
    """

    def __init__(self, allocator: Allocator, count: int, live: Live | None) -> None:
        if live is None:
            allocator.take("tensors", count, f"a tensor of {count} bytes")
        else:
            live.add(count)
        self.allocator, self.bytes, self.live = allocator, count, live
        self.twin: Any = None
        self.untouched = False  # still the zeros that it was made of

    def shadow(self) -> Any:
        """A storage without values on torch's meta device: views of this storage stay views of each other there."""
        if self.twin is None:
            self.twin = torch.empty(self.bytes, dtype=torch.uint8, device="meta").untyped_storage()
        return self.twin

    def keep(self) -> None:
        """Leaves the launch's workspace for a place in its graph, which is charged by the graph."""
        if self.live is not None:
            self.live.now -= self.bytes
            self.live = None
            self.bytes = 0

    def __del__(self) -> None:
        if not hasattr(self, "live"):
            return
        if self.live is not None:
            self.live.now -= self.bytes
        else:
            self.allocator.give("tensors", self.bytes)
