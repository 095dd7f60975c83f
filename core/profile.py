"""The costliest launch of each stage, run once before the KV cache exists: what activations take at most."""

from __future__ import annotations

import gc
from collections.abc import Callable

from trencadis.core.buckets import Bucket, Plan, Stage
from trencadis.core.graphs import GraphManager

PROFILE_BLOCKS = 3
"""KV blocks that exist meanwhile: padding reads and writes the two reserved ones."""


def costliest(plan: Plan, activations: Callable[[Bucket], int]) -> list[Bucket]:
    """One bucket a stage, by a formula of its activations in bytes."""
    stages = [plan.of(stage) for stage in Stage]
    return [max(buckets, key=lambda b: (activations(b), b)) for buckets in stages if buckets]


def profile(graphs: GraphManager, buckets: list[Bucket]) -> None:
    """Runs ``buckets`` on padding with programs of their own: the KV cache will have another shape than now."""
    for bucket in buckets:
        program = graphs.make(bucket)
        program.rehearse()
        graphs.backend.synchronize()
        del program
        gc.collect()
    graphs.expected()
