"""Every bucket of a small plan, on a real model: poison in the padding changes no real result by a bit, and a replay
gives the run's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from poison import BLOCK, SEQS, Rig

from trencadis.backends.cpu import make_backend
from trencadis.core.backend import BackendConfig
from trencadis.core.bucket_env import BucketsAsked
from trencadis.core.buckets import Bucket, Plan, Stage
from trencadis.core.closure import ShapeLimits
from trencadis.core.planner import make_plan

LIMITS = ShapeLimits(SEQS, 256, 256, BLOCK, image_slots=1024, encoder_slots=1024)
STAGES = {
    "hpu": (Stage.FRESH, Stage.CONTEXT, Stage.DECODE, Stage.VISION, Stage.SAMPLE, Stage.RESET),
    "cpu": (Stage.PREFILL, Stage.DECODE, Stage.VISION, Stage.SAMPLE, Stage.RESET),
}
LEAST = {
    Stage.PREFILL: 16, Stage.FRESH: 5, Stage.CONTEXT: 5, Stage.DECODE: 2, Stage.VISION: 3, Stage.SAMPLE: 4,
    Stage.RESET: 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2_5_vl")


def every(plan: Plan, stage: Stage) -> list[Bucket]:
    """Whatever a need within the limits can be given; a plan without lists rounds needs by alignment."""
    if plan.buckets:
        return list(plan.of(stage))
    rows = range(1, 2 * SEQS + 1)
    needs: dict[Stage, list[tuple[int, ...]]] = {
        Stage.PREFILL: [(tokens, r) for tokens in range(1, 130, 9) for r in rows if r <= tokens],
        Stage.VISION: [(slots,) for slots in range(64, LIMITS.image_slots + 1, 64)],
    }
    variants = ("greedy", "full") if stage is Stage.SAMPLE else ("",)
    return sorted({plan.fit(stage, need, v) for need in needs.get(stage, [(r,) for r in rows]) for v in variants})


@pytest.mark.parametrize(("kind", "stage"), [(kind, stage) for kind, stages in STAGES.items() for stage in stages])
def test_padding_changes_no_bit(kind: str, stage: Stage, path: Path, hpu: Callable[..., Any]) -> None:
    if kind == "hpu":
        backend = hpu(block_size=BLOCK, vocab_size=344, dtype=torch.float32)
    else:
        backend = make_backend(BackendConfig(block_size=BLOCK, options={"policy": "padded", "threads": "1"}))
    rig = Rig(path, backend)
    buckets = every(make_plan(backend.policy, LIMITS, BucketsAsked(), rig.model.config), stage)
    assert len(buckets) >= LEAST[stage]
    for bucket in buckets:
        clean, poisoned = (list(rig.results(bucket, poison)) for poison in (False, True))
        first = clean[0]
        assert any(torch.isfinite(t).all() and t.any() for t in first)
        for found in [*clean[1:], *poisoned]:
            for one, other in zip(first, found, strict=True):
                assert torch.equal(one, other), bucket
