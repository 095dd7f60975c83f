"""Which launches are profiled before the KV cache exists: the costliest of each stage. Pure Python."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.core.buckets import Bucket, Plan, Stage


def costliest(plan: Plan, activations: Callable[[Bucket], int]) -> list[Bucket]:
    """One bucket a stage, by a formula of its activations in bytes."""
    stages = [plan.of(stage) for stage in Stage]
    return [max(buckets, key=lambda b: (activations(b), b)) for buckets in stages if buckets]
