"""What a plan compiles: layers are traced once a shape, and what stands around them once a number of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.speculation.test_eagle3 import head_at, weights_of
from tests.traffic.launch_lines import GUIDE, MODELS, model_of
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_settings import HpuSettings, settings
from trencadis.backends.hpu.shape_policy import PIECES, count_compiled, describe_compiled, padded_start, pieces, policy
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.device_shape_policy import PlannedLayer, PlannedModel
from trencadis.core.engine.startup_checks import planned_models
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.launches.draft_loading import HeldDraft, load_drafter
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.memory.draft_memory_estimate import with_drafting_buckets
from trencadis.core.models.decoder import DecoderExit
from trencadis.core.models.mlp_and_norms import RMSNorm
from trencadis.core.models.model_loader import load_model
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.core.spec.draft_checkpoint import find_drafter

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
    backend = HpuBackend(cfg, policy("", lazy=False), make_bridge(device, lazy=False), HpuSettings())
    model: Any = load_model(config, backend, EngineConfig(model="none", load_format="dummy"))
    seqs, tokens = limits.max_rows, limits.max_tokens
    model.bind(
        allocate_persistent(config, backend, blocks=300, block_size=128, arena_rows=20000, seqs=seqs, tokens=tokens)
    )
    runner = ModelRunner(backend, model, plan)
    for bucket in plan.buckets:
        runner.graphs.make(bucket).compile()
    assert backend.hpu_ops.regions is not None
    keys: list[Any] = list(backend.hpu_ops.regions.known)
    return plan, Counter(kind[0] for (_, kind), _ in keys), device


def is_layer(recipe: Any) -> bool:
    """Layers and blocks alone have a gated MLP."""
    return any("silu" in row[0] for row in recipe)


def sizes(rows: Iterable[int]) -> int:
    """How many sizes the pieces of these numbers of rows have."""
    return len({stop - start for count in rows for start, stop in pieces(count)})


def test_pieces_cover_every_row_and_are_few() -> None:
    for rows in [*range(1, 300), *range(300, 32768, 997), 32768]:
        found = list(pieces(rows))
        assert {r for start, stop in found for r in range(start, stop)} == set(range(rows))
        assert {stop - start for start, stop in found} <= {p for p in PIECES if p <= rows}
        assert len(found) <= (4 if rows <= 256 else 8) and rows <= padded_start(rows) <= max(32, 4 * rows)


@pytest.mark.parametrize("rows", [3, 17])
def test_what_is_stored_in_pieces_is_bit_equal(rows: int) -> None:
    """The end of a launch, whose pieces overlap, against one run; rows that nobody touched stay as they were."""
    x, residual, weight = torch.randn(rows, 24), torch.randn(rows, 24), torch.rand(24)
    out = torch.randperm(rows) + 1
    found = []
    for lazy in (True, False):
        backend = HpuBackend(BackendConfig(), policy("", lazy=lazy), make_bridge(EmulatedDevice(profile("")), lazy))
        norm = RMSNorm(backend.ops, 24, 1e-6)
        norm.weight = weight.to(DEVICE)
        hidden = torch.zeros(rows + 2, 24).to(DEVICE)
        backend.ops.by_rows(DecoderExit(backend.ops, norm), tuple(t.to(DEVICE) for t in (x, residual, out)), hidden)
        found.append(hidden.cpu())
    assert torch.equal(*found) and not found[0][0].any() and not found[0][-1].any() and found[0][1:-1].any()


def check(limits: ShapeLimits, around: float, functions: float) -> None:
    """At most so many operations and functions are compiled, as multiples of those of layers."""
    plan, kinds, device = compiled(limits)
    stages = Counter(bucket.stage for bucket in plan.buckets)
    texts = [b for b in plan.buckets if b.stage in TEXTS]
    tokens = [b.dims[0] * b.dims[1] if b.stage is Stage.FRESH else b.dims[0] for b in texts]
    cells = [b.dims[0] // 4 for b in plan.buckets if b.stage is Stage.VISION]
    resets = [b.dims[0] for b in plan.buckets if b.stage is Stage.RESET]
    full = [b.dims[0] for b in plan.buckets if b.variant in ("full", "draw", "penalised")]
    decodes = stages[Stage.DECODE]
    assert (kinds["DecoderLayer"], kinds["LayerGroup"]) == (len(texts) - decodes, decodes) and kinds[
        "ViTBlock"
    ] == 2 * stages[Stage.VISION], "not one for each layer"
    assert kinds["DecoderEntry"] == len(set(map(padded_start, tokens)))
    assert (kinds["DecoderExit"], kinds["Qwen2VLPatchMerger"]) == (sizes(tokens), sizes(cells))
    assert kinds["Qwen2VLPatchEmbed"] == stages[Stage.VISION] and kinds["SamplingHead"] == stages[Stage.SAMPLE]
    masked = [b for b in texts if b.stage is not Stage.FRESH]
    assert (kinds["AttnPreparation"], kinds["SegmentPreparation"]) == (len(masked), stages[Stage.VISION]), (
        "masks are made once a launch, not in each layer"
    )
    assert kinds["HpuOps"] == sizes(resets) + sizes(full), "the counts of drawn ids have a store of their own"
    layers, every = kinds["DecoderLayer"] + kinds["LayerGroup"] + kinds["ViTBlock"], sum(kinds.values())
    assert 0.9 * every <= device.clock.compiles <= every, "each is one recipe; some masks are equal ones"
    config = model_of(*MODELS[2])
    assert config.vision is not None
    layers_of = [PlannedLayer()] * config.text.layers
    made = count_compiled(PlannedModel(plan.buckets, config.vision.launch_parts, layers_of))
    assert made == (every, device.clock.flavours), "the plan names what a start compiles, and from how many places"
    recipes: Any = device.clock._recipes
    work = {kind: sum(len(r) for r in recipes if is_layer(r) is kind) for kind in (True, False)}
    assert sum(map(is_layer, recipes)) == layers
    assert sum(work.values()) <= around * work[True], "what stands around layers is small"
    assert every <= functions * layers
    share = sum(work.values()) / work[True]
    print(f"{len(plan.buckets)} buckets: {layers} layer shapes, as many traces of layers, {every} of everything")
    print(f"functions compiled: {every / layers:.2f} times those of layers; {dict(kinds)}")
    print(f"operations compiled: {work[True]} in layers, {work[False]} around them, {share:.2f} times those of layers")


@pytest.mark.parametrize(("method", "layers"), [("draft_model", 2), ("eagle3", 2), ("eagle3", 12)])
def test_what_drafts_is_counted_beside_its_target(
    method: str, layers: int, vl_checkpoint: Path, checkpoint: Any, tmp_path: Path
) -> None:
    """Its launches are compiled apart; those of a head's target end with two more parts, and a layer whose input they
    keep begins a group of layers.
    """
    taps = {"eagle_aux_hidden_state_layer_ids": [2, 6, 11] if layers > 2 else [0, 1, 1]}
    draft = checkpoint("qwen2", seed=9)
    if method == "eagle3":
        draft = head_at(tmp_path / "head", weights_of(1), eagle_config=taps)
    asked: dict[str, Any] = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    config = EngineConfig(model=str(vl_checkpoint), load_format="dummy", speculative_config=asked, max_model_len=256)
    model_config = load_config(vl_checkpoint)
    model_config = replace(model_config, text=replace(model_config.text, layers=layers))
    drafter = find_drafter(config, model_config)
    assert drafter is not None
    limits = ShapeLimits(2, 64, 256, 16, image_slots=64, least_slots=64, drafts=3)
    found = make_plan(policy("", lazy=False), limits, BucketOptions(), model_config)
    plan = with_drafting_buckets(found, drafter)
    device = EmulatedDevice(profile("gaudi3"), computes=False)
    cfg = BackendConfig(
        dtype=torch.bfloat16, block_size=16, vocab_size=model_config.text.vocab, windows=model_config.text.windows
    )  # fmt: skip
    backend = HpuBackend(cfg, policy("", lazy=False), make_bridge(device, lazy=False), HpuSettings())
    model: Any = load_model(model_config, backend, config)
    tensors = allocate_persistent(model_config, backend, blocks=60, block_size=16, arena_rows=40, seqs=2, tokens=64)
    model.bind(tensors)
    drafting = load_drafter(config, drafter, model)
    assert drafting is not None
    HeldDraft(drafting, backend, tensors, 60, 16)
    runner = ModelRunner(backend, model, plan, draft=drafting)
    for bucket in plan.buckets:
        runner.graphs.make(bucket).compile()
    backends: list[Any] = [backend, drafting.backend]
    functions = [len(one.hpu_ops.regions.known) for one in backends]
    made = [count_compiled(one) for one in planned_models(model_config, plan, drafter)]
    assert [one.functions for one in made] == functions
    assert sum(one.executables for one in made) == device.clock.flavours
    assert f"some {sum(functions)} functions" in describe_compiled(planned_models(model_config, plan, drafter))


def test_a_small_plan_of_a_7b() -> None:
    check(ShapeLimits(2, 512, 512, 128, image_slots=256, least_slots=64), 2.4, 2.4)


@pytest.mark.long
def test_the_guides_plan_of_a_7b() -> None:
    check(GUIDE, 2.0, 2.1)


@pytest.mark.parametrize(("asked", "dispatched"), [("", 9), ("1", 36), ("2", 18)])
def test_layers_of_a_decode_launch_are_dispatched_in_groups(asked: str, dispatched: int) -> None:
    """36 layers of a 3B: one compiled function for all groups, called for each."""
    config = model_of(*MODELS[1])
    device = EmulatedDevice(profile(""), computes=False)
    cfg = BackendConfig(dtype=torch.bfloat16, block_size=128, vocab_size=config.text.vocab)
    switches = settings({"TRENCADIS_HPU_DECODE_LAYERS": asked} if asked else {})
    backend = HpuBackend(cfg, policy("", lazy=False), make_bridge(device, lazy=False), switches)
    model: Any = load_model(config, backend, EngineConfig(model="none", load_format="dummy"))
    model.bind(allocate_persistent(config, backend, blocks=20, block_size=128, arena_rows=10, seqs=4, tokens=128))
    called: Counter[str] = Counter()
    layer = backend.hpu_ops.layer

    def counted(run: Any, *args: Any) -> Any:
        called[type(run).__name__] += 1
        return layer(run, *args)

    backend.hpu_ops.layer = counted  # type: ignore[method-assign]
    for bucket in (Bucket(Stage.DECODE, (2, 8)), Bucket(Stage.FRESH, (1, 64))):
        backend.program(bucket, model.text).run()
        decodes = bucket.stage is Stage.DECODE
        kind = "LayerGroup" if decodes and asked != "1" else "DecoderLayer"
        assert called == {kind: dispatched if decodes else 36}, bucket
        assert backend.hpu_ops.regions is not None
        keys: list[Any] = list(backend.hpu_ops.regions.known)
        known = sum(found[0] == kind for (_, found), _ in keys)
        assert known == (2 if asked == "1" and not decodes else 1)
        called.clear()


def test_an_unknown_size_of_groups_is_one_line() -> None:
    with pytest.raises(StartupError, match="1, 2 or 4"):
        settings({"TRENCADIS_HPU_DECODE_LAYERS": "3"})
