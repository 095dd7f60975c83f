"""Every stage's body is one graph: stores go back in place, and no operation is left to eager execution."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.assets import demo_path
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import base, profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_graph_lowering import calls, is_view
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import policy
from trencadis.backends.hpu.start import check_hpu_kernels
from trencadis.core.buckets import Bucket, Stage, ahead_variant, verify_variant
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.quant_config import online
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine_config import EngineConfig
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.models.model_loader import load_model
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import Qwen25VisionConfig

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[3]
LAYERS = 2
BODIES = {
    "fresh": Bucket(Stage.FRESH, (2, 64)),
    "context": Bucket(Stage.CONTEXT, (64, 2)),
    "decode": Bucket(Stage.DECODE, (4, 8)),
    "vision": Bucket(Stage.VISION, (128,)),
    "greedy": Bucket(Stage.SAMPLE, (2,), "greedy"),
    "full": Bucket(Stage.SAMPLE, (2,), "full"),
    "draw": Bucket(Stage.SAMPLE, (2,), "draw"),
    "penalised": Bucket(Stage.SAMPLE, (2,), "penalised"),
    "ahead": Bucket(Stage.SAMPLE, (2,), ahead_variant(3)),
    "reset": Bucket(Stage.RESET, (2,)),
    "verify": Bucket(Stage.VERIFY, (2, 8), verify_variant(3)),
    "top64": Bucket(Stage.SAMPLE, (2,), "top64"),
    "pool": Bucket(Stage.POOL, (4,)),
}

pytestmark = pytest.mark.part("gaudi")


@cache
def make_harness(kernels: bool = True, dtype: torch.dtype = torch.bfloat16, method: str = "") -> Any:
    """The demo model with two layers of each kind, each body compiled as a whole; ``method``: of quantised weights."""
    device = EmulatedDevice(profile(""))
    bridge = make_bridge(device, lazy=False)
    if not kernels:
        bridge = dataclasses.replace(bridge, fused_sdpa=None, fused_rms_norm=None, apply_rotary=None)
    stored = load_config(demo_path())
    assert isinstance(stored.vision, Qwen25VisionConfig)
    text = dataclasses.replace(stored.text, layers=LAYERS)
    config = dataclasses.replace(
        stored, text=text, vision=dataclasses.replace(stored.vision, depth=LAYERS, full_layers=(1,)),
        quant=online(method) if method else None,
    )  # fmt: skip
    cfg = BackendConfig(dtype=dtype, block_size=64, vocab_size=text.vocab)
    backend = HpuBackend(cfg, policy("", lazy=False), bridge, HpuSettings(regional=False))
    model: Any = load_model(config, backend, EngineConfig(model=str(demo_path())))
    model.bind(allocate_persistent(config, backend, blocks=6, block_size=64, arena_rows=40, seqs=2, tokens=128))
    return SimpleNamespace(device=device, backend=backend, model=model)


def body(model: Any, name: str) -> Callable[[Any], Any]:
    found: dict[str, Callable[[Any], Any]] = {
        "greedy": lambda t: model.head(t, False), "full": lambda t: model.head(t, True),
        "draw": model.drawn_head, "penalised": model.penalised_head,
        "ahead": lambda t: model.head(t, True), "vision": model.vision, "reset": model.reset,
        "top64": partial(model.score_top, 64), "pool": model.pool,
    }  # fmt: skip
    return found.get(name, model.text)


def traced(name: str, **how: Any) -> Any:
    """What the compiler made of a body, which is compiled, and run twice more."""
    made = make_harness(**how)
    program = made.backend.program(BODIES[name], body(made.model, name))
    before, graphs = counters["stats"]["unique_graphs"], len(made.device.graphs)
    program.compile()
    program.run()
    program.run()
    assert counters["stats"]["unique_graphs"] == before + 1, "one graph, and no second one for the same shapes"
    (lowered,) = made.device.graphs[graphs:]
    return made, lowered


def check(name: str, **how: Any) -> None:
    made, lowered = traced(name, **how)
    assert not lowered.eager and len(lowered.recipes) == 1
    (output,) = [n for n in lowered.graph.graph.nodes if n.op == "output"]
    assert not any(is_view(n) for n in output.all_input_nodes), "a view that leaves a graph is taken eagerly"
    cache_shape = made.model.persistent.kv[0].k.shape
    stores = [n for n in calls(lowered.graph) if n.target is aten.index_copy_.default]
    kept = [n for n in stores if n.args[0].meta["val"].shape == cache_shape]
    stored = BODIES[name].stage in (Stage.FRESH, Stage.CONTEXT, Stage.DECODE, Stage.VERIFY)
    assert len(kept) == (2 * LAYERS if stored else 0)
    assert not any("index_put" in str(n.target) for n in calls(lowered.graph))
    counts = made.model.persistent.state.counts
    counted = name in ("full", "draw", "penalised", "ahead")
    assert list(lowered.copied.values()) == ([counts.numel() * 4] if counted else []), "what is written anew"


@pytest.mark.parametrize("name", ["decode", "full", "penalised", "ahead"])
def test_a_body_is_one_graph_that_stores_in_place_and_leaves_nothing_out(name: str) -> None:
    check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_body_with_and_without_fused_kernels(name: str, kernels: bool, dtype: torch.dtype) -> None:
    check(name, kernels=kernels, dtype=dtype)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fresh", "decode", "greedy"])
def test_bodies_with_weights_of_8_bit_floats(name: str) -> None:
    check(name, method="fp8")


TRACED = (
    *(ROOT / "core" / "models").glob("*.py"),
    *(ROOT / "backends" / "hpu" / "attention").glob("*.py"),
    *(ROOT / "backends" / "hpu" / f"{name}.py" for name in ("collectives", "hccl_comm", "ops", "hpu_quantised_linear")),
    *(ROOT / "backends" / "cpu" / f"{name}.py" for name in ("reference_ops", "sampler")),
    *(ROOT / "multimodal" / f"{name}.py" for name in ("vit/vit_block", "qwen2_vl/model", "llava/model")),
)


def test_what_is_traced_has_no_match_statement() -> None:
    """The Dynamo of torch 2.6 has no MATCH_CLASS; the newest one would hide it."""
    for path in TRACED:
        assert not any(isinstance(node, ast.Match) for node in ast.walk(ast.parse(path.read_text()))), path


def by_index_put(cache: Any, slot: Any, values: Any) -> Any:
    return cache.index_put_((slot,), values)


def by_view(cache: Any, slot: Any, values: Any) -> Any:
    return cache.view(-1, 2, 4).index_copy_(0, slot, values.view(-1, 2, 4))


def after_a_reader(cache: Any, slot: Any, values: Any) -> Any:
    cache.index_copy_(0, slot, values + cache.index_select(0, slot))


def before_an_eager_reader(cache: Any, slot: Any, values: Any) -> Any:
    cache.index_copy_(0, slot, values)
    return cache[slot]


def in_place(cache: Any, slot: Any, values: Any) -> Any:
    cache.index_copy_(0, slot, values)
    return cache.index_select(0, slot)


@pytest.mark.parametrize(
    ("store", "anew"),
    [(in_place, False), (by_index_put, True), (by_view, True), (after_a_reader, True), (before_an_eager_reader, True)],
)
def test_a_store_that_stays_functional_writes_the_whole_cache(store: Any, anew: bool) -> None:
    """Bytes, time and workspace are charged; the values are right all the same."""
    device = EmulatedDevice(profile(""))
    bridge = make_bridge(device, lazy=False)
    host = torch.randn(1000, 8)
    cache, slot, values = host.clone().to(DEVICE), torch.tensor([3, 5]).to(DEVICE), torch.ones(2, 8).to(DEVICE)
    run = bridge.compile(store)
    run(cache, slot, values)
    assert device.clock.written_anew == (cache.numel() * 4 if anew else 0)
    assert (device.allocator.used["workspace"] >= cache.numel() * 4) == anew
    wanted = host.index_copy(
        0, torch.tensor([3, 5]), torch.ones(2, 8) + (host[[3, 5]] if store is after_a_reader else 0)
    )
    torch.testing.assert_close(cache.cpu(), wanted)
    before = device.clock.seconds
    run(cache, slot, values)
    assert device.clock.seconds - before == pytest.approx(2 * cache.numel() * 4 / device.profile.bandwidth * anew)


class Names(TorchDispatchMode):
    """Base names of all operations that torch runs meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(base(func))
        return func(*args, **(kwargs or {}))


@cache
def probed() -> frozenset[str]:
    """Operations of the lines that ``check-hpu`` prints of plain torch, and the fused ones, which have their own."""
    with Names() as names:
        for run, args in check_hpu_kernels.kernels(make_bridge(EmulatedDevice(profile("")), lazy=False)).values():
            run(*args)
    fused = {"sdpa_recomp_fwd", "rms_norm", "rotary_pos_embedding", "cast_to_fp8_v2", "cast_from_fp8", "fp8_gemm_v2"}
    return frozenset(names.seen | fused)


def check_probed(name: str, **how: Any) -> None:
    """Every operation of a body that computes something has a line in ``check-hpu``."""
    _, lowered = traced(name, **how)
    used = {base(node.target) for node in calls(lowered.graph) if not is_view(node)}
    assert sorted(used - probed() - {"getitem", "copy", "clone", "_unsafe_view", "scalar_tensor"}) == [], name


@pytest.mark.parametrize("name", ["decode", "full"])
def test_check_hpu_probes_what_a_body_uses(name: str) -> None:
    check_probed(name)


@pytest.mark.long
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("kernels", [True, False])
def test_check_hpu_probes_what_every_body_uses(name: str, kernels: bool) -> None:
    check_probed(name, kernels=kernels)
