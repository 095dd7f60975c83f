"""The 8-bit KV cache on the emulated Gaudi: every stage against the reference, the casts' ranges, whole engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.gaudi_launches import BLOCK, BLOCKS, GROUPS, HEAD, LAUNCHES, AttentionLayer, step_inputs
from tests.quant.coded_caches import filled
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.backends.cpu import make_backend
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import policy, without_fp8
from trencadis.backends.hpu.start.bridge_loader import find_symbols
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.device.backend import BackendConfig, LayerKV
from trencadis.core.engine.engine_builder import create_engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.models.kv_cache_quantisation import read_slots
from trencadis.server.plan.plan_command import make_plan

TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def cache_for(kind: str, kept: int, sink: float) -> LayerKV:
    """A filled cache on the host, in blocks; scales and kept values of SINK are ``sink``."""
    cache = filled(kind, BLOCKS, BLOCK, GROUPS, HEAD, kept, torch.float32, torch.Generator().manual_seed(3))
    for t in cache[2:5]:
        if t is not None:
            t[0], t[1] = 0, sink
    return cache


def on_card(cache: LayerKV, kind: str, device: Any) -> LayerKV:
    """The cache flat on the card, codes of its own type."""
    parts = [t.flatten(0, 1) if i < 5 and t is not None else t for i, t in enumerate(cache)]
    parts[:2] = [t.view(TYPES[kind]) for t in parts[:2] if t is not None]
    return LayerKV(*(t.to(device) if t is not None else None for t in parts))  # type: ignore[arg-type]


def wanted(kind: str, kept: int, inputs: Any) -> tuple[torch.Tensor, LayerKV]:
    """The reference's output and cache."""
    backend = make_backend(BackendConfig(block_size=BLOCK, options={"ops": "reference", "threads": "1"}))
    layer = AttentionLayer(backend, 0.0)
    layer.kv = cache_for(kind, kept, 0.0)
    n, r = len(inputs.tokens), len(inputs.context)
    program = backend.program(Bucket(Stage.PREFILL, (n, r)), layer)
    backend.fill(program, inputs)
    program.run()
    return layer.out[1 : n + 1], layer.kv


SWITCHES = {
    "fused": HpuSettings(), "plain": HpuSettings(fused_sdpa=False), "slices": HpuSettings(context_slice=8),
}  # fmt: skip


def compare(kind: str, kept: int, name: str, how: str, lazy: bool) -> None:
    stage, dims, lengths = LAUNCHES[name]
    inputs = step_inputs(lengths, np.random.default_rng(1))
    want, cache = wanted(kind, kept, inputs)
    bridge = make_bridge(EmulatedDevice(profile("")), lazy)
    cfg = BackendConfig(block_size=BLOCK, dtype=torch.float32)
    backend = HpuBackend(cfg, policy("", lazy=lazy), bridge, SWITCHES[how])
    layer = AttentionLayer(backend, 0.0)
    layer.kv = on_card(cache_for(kind, kept, float("nan")), kind, backend.device)
    program = backend.program(Bucket(stage, dims), layer)
    backend.fill(program, inputs)
    program.run()
    got = layer.out.cpu()[1 : len(inputs.tokens) + 1]
    torch.testing.assert_close(got, want, rtol=3e-3, atol=3e-3)
    assert float((got - want).abs().mean()) < 1e-4
    assert backend.fallbacks() == 0
    held = LayerKV(*(t.cpu() if t is not None else None for t in layer.kv))  # type: ignore[arg-type]
    slots = torch.arange(2 * BLOCK, BLOCKS * BLOCK)
    blocked = [t.view(BLOCKS, BLOCK, *t.shape[1:]) if i < 5 and t is not None else t for i, t in enumerate(held)]
    in_blocks = LayerKV(*blocked)  # type: ignore[arg-type]
    for a, b in zip(read_slots(in_blocks, slots, torch.float32), read_slots(cache, slots, torch.float32), strict=True):
        assert float((a - b).abs().mean()) < 1e-4


@pytest.mark.parametrize(
    ("kind", "kept", "name", "how", "lazy"),
    [
        ("fp8", 8, "fresh", "fused", True), ("fp8", 8, "context", "fused", True), ("fp8", 8, "context", "slices", True),
        ("fp8", 8, "decode", "fused", True), ("fp8", 0, "decode", "plain", True), ("int8", 8, "decode", "fused", True),
        ("int8", 0, "context_full", "plain", True), ("fp8", 8, "decode", "fused", False),
    ],
)  # fmt: skip
def test_every_stage_is_the_reference(kind: str, kept: int, name: str, how: str, lazy: bool) -> None:
    compare(kind, kept, name, how, lazy)


@pytest.mark.long
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("how", SWITCHES)
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("kept", [0, 8])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_every_stage_is_the_reference_long(kind: str, kept: int, name: str, how: str, lazy: bool) -> None:
    compare(kind, kept, name, how, lazy)


@pytest.mark.parametrize(("card", "top"), [("gaudi2", 240.0), ("gaudi3", 448.0)])
def test_a_card_has_no_code_beyond_its_range(card: str, top: float) -> None:
    bridge = make_bridge(EmulatedDevice(profile(card)))
    assert bridge.cast_to_fp8_v2 is not None and bridge.cast_from_fp8 is not None
    given = torch.tensor([0.0, 1.0, 240.0, -240.0, 256.0, 448.0, -480.0])
    found = bridge.cast_from_fp8(bridge.cast_to_fp8_v2(given.to(bridge.device)), torch.float32).cpu()
    inside = given.abs() <= top
    assert found[~inside].isnan().all() and torch.equal(found[:4], given[:4]) and found[inside].isfinite().all()
    with pytest.raises(RuntimeError, match="takes 8-bit floats"):
        bridge.cast_from_fp8(given.to(bridge.device), torch.float32)


def test_a_plug_in_without_the_casts_has_no_fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "hpu", type("Ops", (), {"cast_to_fp8_v2": 1}), raising=False)
    found = find_symbols("1.24.1.35", "GAUDI3")
    assert found.cast_to_fp8_v2 is None and found.cast_from_fp8 is None
    assert list(without_fp8(policy("")).kv_codes) == ["int8"]


FLAGS: dict[str, Any] = dict(
    mm_processor_kwargs={"min_pixels": 56 * 56, "max_pixels": 200 * 200}, max_model_len=256, max_num_seqs=4,
    max_num_batched_tokens=128, block_size=64, dtype="float32",
)  # fmt: skip
PROMPTS = ("Who are you?", "Name three colours and three shapes, please.", "yes or no", "1 2 3 4 5 6 7 8")


def tokens(**flags: Any) -> tuple[list[list[int]], Any]:
    llm = LLM(str(demo_path()), **{**FLAGS, **flags})
    rank: Any = llm.engine.executor._rank  # type: ignore[attr-defined]
    before = rank.backend.compilations()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = [
        list(o.outputs[0].token_ids) for _ in range(2) for o in llm.generate(list(PROMPTS), params, use_tqdm=False)
    ]
    after = rank.backend.compilations()
    ledger = rank.graphs
    llm.close()
    return found, (after - before, ledger)


def engine(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = tokens(kv_cache_dtype=kind, device="cpu")
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1" if mode == "graphs" else "0")
    got, (compiled, _) = tokens(kv_cache_dtype=kind, device="hpu")
    assert got == want and compiled == 0


@pytest.mark.long
@pytest.mark.parametrize("mode", ["graphs", "compile"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_engines_give_the_cpus_tokens_and_compile_nothing(
    kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(kind, mode, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 0.75, 0.99])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_start_books_what_the_plan_says(
    kind: str, share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A card without values: weights and cache to the byte, every planned bucket, rows that sum to the card."""
    for name, value in {"": "1", "_KIND": "meta", "_PROFILE": "gaudi3"}.items():
        monkeypatch.setenv(f"TRENCADIS_HPU_EMULATOR{name}", value)
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    config = EngineConfig(
        model=str(demo_path()), device="hpu", max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512,
        kv_cache_dtype=kind, gpu_memory_utilization=share,
    )  # fmt: skip
    planned = make_plan(config, load_model_config(config), int(126.5 * (1 << 30)))
    engine = create_engine(config)
    plan = engine.info().graphs
    assert plan is not None and {b.name for b in plan.buckets} == {str(b) for b in planned.plan.buckets}
    rows, paper = dict(plan.ledger), dict(planned.ledger.rows())
    assert sum(rows.values()) == plan.total and rows["weights"] == paper["weights"]
    block = planned.estimator.block_bytes(planned.limits.block_size)
    assert rows["KV cache"] == engine.info().kv_bytes and rows["KV cache"] % block == 0
    assert abs(rows["KV cache"] - paper["KV cache"]) < 0.02 * paper["KV cache"]
    engine.close()
