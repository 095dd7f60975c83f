"""What a plan compiles: layers are traced once a shape, and what stands around them once a number of tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.traffic.launch_lines import GUIDE, MODELS, model_of
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.device import EmulatedDevice
from trencadis.backends.hpu.emulator.namespace import of
from trencadis.backends.hpu.emulator.profiles import profile
from trencadis.backends.hpu.policy import policy
from trencadis.backends.hpu.settings import HpuSettings
from trencadis.core.backend import BackendConfig
from trencadis.core.buckets import Plan, Stage
from trencadis.core.config import EngineConfig
from trencadis.core.launches.persistent import persistent
from trencadis.core.launches.runner import Runner
from trencadis.core.models.registry import build
from trencadis.core.shapes.closure import ShapeLimits
from trencadis.core.shapes.options import BucketOptions
from trencadis.core.shapes.planner import make_plan

TEXTS = (Stage.FRESH, Stage.CONTEXT, Stage.DECODE)

pytestmark = pytest.mark.part("gaudi")


def compiled(limits: ShapeLimits) -> tuple[Plan, Counter[str], EmulatedDevice]:
    """A 7B's plan, and how many compiled functions of each kind its buckets need, on a card without values.

    ``tests/hpu/compiled/test_compile_serving.py`` shows that a compiled function is one graph to Dynamo.
    """
    config = model_of(*MODELS[2])
    plan = make_plan(policy(""), limits, BucketOptions(), config)
    device = EmulatedDevice(profile("gaudi3"), computes=False)
    cfg = BackendConfig(dtype=torch.bfloat16, block_size=128, vocab_size=config.text.vocab)
    backend = HpuBackend(cfg, policy("", lazy=False), of(device, lazy=False), HpuSettings())
    model: Any = build(config, backend, EngineConfig(model="none", load_format="dummy"))
    seqs, tokens = limits.max_rows, limits.max_tokens
    model.bind(persistent(config, backend, blocks=300, block_size=128, arena_rows=20000, seqs=seqs, tokens=tokens))
    runner = Runner(backend, model, plan)
    for bucket in plan.buckets:
        runner.graphs.make(bucket).compile()
    assert backend.hpu_ops.regions is not None
    keys: list[Any] = list(backend.hpu_ops.regions.known)
    return plan, Counter(kind[0] for (_, kind), _ in keys), device


def is_layer(recipe: Any) -> bool:
    """Layers and blocks alone have a gated MLP."""
    return any("silu" in row[0] for row in recipe)


def check(limits: ShapeLimits, around: float) -> None:
    """``around``: most operations compiled, as a multiple of those in layers."""
    plan, kinds, device = compiled(limits)
    stages = Counter(bucket.stage for bucket in plan.buckets)
    texts = [b for b in plan.buckets if b.stage in TEXTS]
    tokens = {b.dims[0] * b.dims[1] if b.stage is Stage.FRESH else b.dims[0] for b in texts}
    assert kinds["Layer"] == len(texts) and kinds["VisionBlock"] == 2 * stages[Stage.VISION], "not one for each layer"
    assert kinds["Entry"] == kinds["Exit"] == len(tokens) < len(texts)
    assert kinds["TowerEntry"] == kinds["TowerExit"] == stages[Stage.VISION]
    assert kinds["Sampling"] == stages[Stage.SAMPLE]
    full = sum(bucket.variant == "full" for bucket in plan.buckets)
    assert kinds["HpuOps"] == stages[Stage.RESET] + full, "the counts of drawn ids have a store of their own"
    layers, every = kinds["Layer"] + kinds["VisionBlock"], sum(kinds.values())
    assert device.clock.compiles == every, "each is one recipe"
    recipes: Any = device.clock._recipes
    work = {kind: sum(len(r) for r in recipes if is_layer(r) is kind) for kind in (True, False)}
    assert sum(map(is_layer, recipes)) == layers
    assert sum(work.values()) <= around * work[True], "what stands around layers is small"
    share = sum(work.values()) / work[True]
    print(f"{len(plan.buckets)} buckets: {layers} layer shapes, as many traces of layers, {every} of everything")
    print(f"operations compiled: {work[True]} in layers, {work[False]} around them, {share:.2f} times those of layers")


def test_a_small_plan_of_a_7b() -> None:
    check(ShapeLimits(2, 512, 512, 128, image_slots=256, least_slots=64), 1.4)


@pytest.mark.long
def test_the_guides_plan_of_a_7b() -> None:
    check(GUIDE, 1.3)
