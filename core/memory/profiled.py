"""Selects the launches that are profiled before the KV cache exists: the costliest of each stage. Pure Python."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.core.buckets import Bucket, Plan, Stage


def costliest(plan: Plan, activations: Callable[[Bucket], int]) -> list[Bucket]:
    """The bucket of each stage with the most bytes of ``activations``."""
    stages = [plan.of(stage) for stage in Stage]
    return [max(buckets, key=lambda b: (activations(b), b)) for buckets in stages if buckets]
