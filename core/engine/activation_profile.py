"""Measures activations before the KV cache exists, and charges the rows of the ledger with what each phase uses.

The costliest launch of each stage runs once on padding. Its graph is thrown away: what counts is the memory that it
leaves in use, which is what a captured launch of this size will need beside the cache.
"""

from __future__ import annotations

import gc

from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import Backend
from trencadis.core.errors import StartupError, format_error, is_out_of_memory
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.memory.memory_split import MemoryInUse


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
        names = (
            *("others", "weights", "arena", "state", "hidden", "inputs", "activations", "copies"),
            *("recurrent", "adapters", "draft_weights"),
        )
        return MemoryInUse(self.total, *(self.rows.get(name, 0) for name in names))


PROFILE_BLOCKS = RESERVED_BLOCKS + 1
"""KV blocks during profiling: the reserved ones, which padding reads and writes, and one more."""


def profile_activations(graphs: GraphManager, buckets: list[Bucket]) -> dict[Bucket, int]:
    """Runs ``buckets`` on padding with temporary programs, because the later KV cache has another shape.

    Returns, for each bucket, the bytes that are in use on the device after its run.

    Raises:
        StartupError: one line if a bucket's run does not fit the device's memory.
    """
    taken, free = {}, graphs.backend.memory.free
    graphs.backend.synchronize()
    before = free()
    for bucket in buckets:
        program = graphs.make(bucket)
        try:
            program.rehearse()
            graphs.backend.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise StartupError(
                f"{bucket}, one of the largest launches, does not fit the device ({format_error(error)}): lower "
                "--max-num-batched-tokens, --max-num-seqs, or max_pixels of --mm-processor-kwargs"
            ) from None
        del program
        gc.collect()
        taken[bucket] = max(before - free(), 0)
    graphs.accept_compilations()
    return taken
