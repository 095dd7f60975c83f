"""Measures the ledger's rows: each phase of the start-up is charged with the free memory that it consumed."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from trencadis.core.memory.ledger import MemoryInUse

if TYPE_CHECKING:
    from trencadis.core.backend import Backend


class MemoryMeter:
    """The rows of the ledger before graphs. ``others`` is the memory in use when the meter was created."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.total = backend.memory.total()
        self._free = backend.memory.free()
        self.rows: dict[str, int] = {"others": self.total - self._free}

    def charge(self, row: str) -> int:
        """Charges ``row`` with the bytes used since the last call; returns them."""
        gc.collect()
        self._backend.synchronize()
        free = self._backend.memory.free()
        taken, self._free = self._free - free, free
        self.rows[row] = self.rows.get(row, 0) + taken
        return taken

    def memory_in_use(self) -> MemoryInUse:
        """Returns the bytes in use before the KV cache is allocated."""
        names = ("others", "weights", "arena", "state", "hidden", "inputs", "activations", "copies")
        return MemoryInUse(self.total, *(self.rows.get(name, 0) for name in names))
