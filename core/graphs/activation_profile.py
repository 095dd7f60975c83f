"""Measures activations: runs the costliest launch of each stage once, before the KV cache exists."""

from __future__ import annotations

import gc

from trencadis.core.buckets import Bucket
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.shared_constants import RESERVED_BLOCKS

PROFILE_BLOCKS = RESERVED_BLOCKS + 1
"""KV blocks during profiling: the reserved ones, which padding reads and writes, and one more."""


def profile_activations(graphs: GraphManager, buckets: list[Bucket]) -> dict[Bucket, int]:
    """Runs ``buckets`` on padding with temporary programs, because the later KV cache has another shape.

    Returns, for each bucket, the bytes that are in use on the device after its run.
    """
    taken, free = {}, graphs.backend.memory.free
    graphs.backend.synchronize()
    before = free()
    for bucket in buckets:
        program = graphs.make(bucket)
        program.rehearse()
        graphs.backend.synchronize()
        del program
        gc.collect()
        taken[bucket] = max(before - free(), 0)
    graphs.accept_compilations()
    return taken
