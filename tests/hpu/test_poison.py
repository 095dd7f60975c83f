"""Every bucket of a small plan, on a real model: poison in the padding changes no real result by a bit, and a replay
gives the run's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trencadis.backends.conformance.launch_harness import Harness, all_buckets
from trencadis.backends.cpu import make_backend
from trencadis.core.buckets import Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig

BLOCK = 16
STAGES = {
    "hpu": (Stage.FRESH, Stage.CONTEXT, Stage.DECODE, Stage.VISION, Stage.SAMPLE, Stage.RESET, Stage.POOL),
    "cpu": (Stage.PREFILL, Stage.DECODE, Stage.VISION, Stage.SAMPLE, Stage.RESET, Stage.POOL),
}
LEAST = {
    Stage.PREFILL: 16, Stage.FRESH: 5, Stage.CONTEXT: 5, Stage.DECODE: 2, Stage.VISION: 3, Stage.SAMPLE: 4,
    Stage.RESET: 2, Stage.POOL: 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2_5_vl")


@pytest.mark.parametrize(("kind", "stage"), [(kind, stage) for kind, stages in STAGES.items() for stage in stages])
def test_padding_changes_no_bit(kind: str, stage: Stage, path: Path, hpu: Callable[..., Any]) -> None:
    if kind == "hpu":
        backend = hpu(block_size=BLOCK, vocab_size=344, dtype=torch.float32)
    else:
        backend = make_backend(BackendConfig(block_size=BLOCK, options={"policy": "padded", "threads": "1"}))
    harness = Harness(load_config(path), backend, BLOCK)
    buckets = all_buckets(harness.plan, stage)
    assert len(buckets) >= LEAST[stage]
    for bucket in buckets:
        found = []
        for poison in (False, True):
            inputs, real = harness.inputs(bucket, np.random.default_rng(3))
            program = harness.backend.program(bucket, harness.body(bucket))
            harness.backend.fill(program, inputs)
            if poison:
                assert harness.junk(program, inputs)
            found.append(harness.launch(program, "run", real, poison))
            if backend.policy.captures:
                program.capture()
                found.append(harness.launch(program, "replay", real, poison))
        assert any(torch.isfinite(t).all() and t.any() for t in found[0])
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                assert torch.equal(one, two), bucket
