"""Bytes by row as a device reports them: each phase of a start-up is charged what it took from the free memory."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from trencadis.core.memory.ledger import Before

if TYPE_CHECKING:
    from trencadis.core.backend import Backend


class Meter:
    """Rows of the ledger before graphs. ``others`` is what was used when it was made."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.total = backend.memory.total()
        self._free = backend.memory.free()
        self.rows: dict[str, int] = {"others": self.total - self._free}

    def book(self, row: str) -> int:
        """Charges ``row`` with what is gone since the last call; returns that."""
        gc.collect()
        self._backend.synchronize()
        free = self._backend.memory.free()
        taken, self._free = self._free - free, free
        self.rows[row] = self.rows.get(row, 0) + taken
        return taken

    def before(self) -> Before:
        """What is spoken for before the KV cache."""
        names = ("others", "weights", "arena", "state", "hidden", "inputs", "activations")
        return Before(self.total, *(self.rows.get(name, 0) for name in names))
