"""Measures activations: runs the costliest launch of each stage once, before the KV cache exists."""

from __future__ import annotations

import gc

from trencadis.core.buckets import Bucket
from trencadis.core.errors import StartupError
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.graphs.oom_errors import format_error, is_out_of_memory
from trencadis.core.shared_constants import RESERVED_BLOCKS

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
