"""What small models of several families compile: one function for all layers of a kind, as many as the plan says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.plan.test_states import LARGE
from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.launch_recording_and_replay import signature
from trencadis.backends.hpu.hpu_settings import settings
from trencadis.backends.hpu.shape_policy import CompiledParts, count_compiled, policy
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.device.backend import BackendConfig
from trencadis.core.device_shape_policy import PlannedModel
from trencadis.core.engine.startup_checks import planned_models
from trencadis.core.engine_config import EngineConfig
from trencadis.core.launches.kv_cache_and_state_allocation import allocate_persistent
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.models.mlp_and_norms import RMSNorm
from trencadis.core.models.model_loader import load_model
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.shape_limits import ShapeLimits

pytestmark = pytest.mark.part("gaudi")

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    "rope_theta": 1e4,
}  # fmt: skip
QWEN3 = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
ROPE = {**LARGE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": QWEN3,
    "qwen3-moe": {**QWEN3, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "gemma3": {
        **SIZES, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16,
        "sliding_window": 32, "sliding_window_pattern": 6,
    },
    "recurrent": {
        **LARGE, **{name: SIZES[name] for name in SIZES if name != "rope_theta"}, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": ROPE,
    },
}  # fmt: skip
"""config.json of text models of several families, of 8 layers each."""


class Compiled(NamedTuple):
    """What a start compiled on a card without values, its launches, and what the plan had said."""

    backend: HpuBackend
    card: EmulatedDevice
    buckets: tuple[Bucket, ...]
    model: PlannedModel
    planned: CompiledParts

    @property
    def counted(self) -> CompiledParts:
        """Returns the functions and executables that there are."""
        regions = self.backend.hpu_ops.regions
        assert regions is not None
        return CompiledParts(len(regions.known), self.card.clock.flavours)

    def count_kinds(self) -> Counter[str]:
        """Returns how many functions there are of each class of parts."""
        regions = self.backend.hpu_ops.regions
        assert regions is not None
        keys: list[Any] = list(regions.known)
        return Counter(kind[0] for (_, kind), _ in keys)


def start(folder: Path, family: str, **variables: str) -> Compiled:
    """Compiles every launch of a small plan of a family."""
    (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
    model_config = load_config(folder)
    text = model_config.text
    plan = make_plan(policy("", lazy=False), ShapeLimits(2, 64, 256, 16), BucketOptions(), model_config)
    card = EmulatedDevice(profile("gaudi3"), computes=False)
    cfg = BackendConfig(
        dtype=torch.bfloat16, block_size=16, vocab_size=text.vocab, windows=text.windows,
        recurrent=text.recurrent is not None,
    )  # fmt: skip
    backend = HpuBackend(cfg, policy("", lazy=False), make_bridge(card, lazy=False), settings(variables))
    config = EngineConfig(model=str(folder), load_format="dummy", max_model_len=256)
    model: Any = load_model(model_config, backend, config)
    sizes: dict[str, int] = dict(blocks=60, block_size=16, arena_rows=40, seqs=2, tokens=64)
    model.bind(allocate_persistent(model_config, backend, **sizes))
    runner = ModelRunner(backend, model, plan)
    for bucket in plan.buckets:
        runner.graphs.make(bucket).compile()
    (planned,) = planned_models(model_config, plan, None)
    return Compiled(backend, card, tuple(plan.buckets), planned, count_compiled(planned, settings(variables)))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3-moe"])
def test_layers_of_a_kind_share_a_function(family: str, tmp_path: Path) -> None:
    """Also where layers have norms of q and k, which are parts in a tuple, of which each layer has its own."""
    made = start(tmp_path, family)
    stages, kinds = Counter(bucket.stage for bucket in made.buckets), made.count_kinds()
    assert kinds["DecoderLayer"] == stages[Stage.FRESH] + stages[Stage.CONTEXT]
    assert kinds["LayerGroup"] == stages[Stage.DECODE]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", ["1", "2", "4"])
def test_the_plan_names_what_a_start_compiles(family: str, group: str, tmp_path: Path) -> None:
    """Functions and executables of layers with and without windows, with experts, with a state, in groups or alone."""
    made = start(tmp_path, family, TRENCADIS_HPU_DECODE_LAYERS=group)
    assert made.planned == made.counted and not made.card.clock.lines
    environ = {"PT_HPU_LAZY_MODE": "0", "TRENCADIS_HPU_DECODE_LAYERS": group}
    described = policy("", environ, lazy=False).compiled
    assert described is not None and f"some {made.counted.functions} functions" in described([made.model])


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_launch_compiled_as_a_whole_is_one_function(family: str, tmp_path: Path) -> None:
    made = start(tmp_path, family, VLLM_T_COMPILE_REGIONAL_COMPILATION="0")
    assert made.planned == (len(made.buckets), made.card.clock.flavours) and made.planned.functions > 10


class Normed:
    """A part whose norms stand in a tuple and in a list."""

    def __init__(self, backend: HpuBackend, weight: float, width: int = 4) -> None:
        self.pair = (RMSNorm(backend.ops, width, 1e-6),)
        self.several = [RMSNorm(backend.ops, width, 1e-6)]
        for norm in (*self.pair, *self.several):
            norm.weight = torch.full((width,), weight).to(DEVICE)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.several[0](self.pair[0](x)[0])[0]


def test_parts_in_tuples_and_lists_are_told_apart_by_their_kinds(hpu: Any) -> None:
    backend = hpu(lazy=False)
    x = torch.ones(3, 4).to(DEVICE)
    assert [round(backend.ops.layer(Normed(backend, w), x).cpu()[0, 0].item(), 3) for w in (1.0, 2.0, 3.0)] == [1, 2, 3]
    assert len(backend.hpu_ops.regions.known) == 1, "equal parts share a function, each with its own weights"
    (
        backend.ops.layer(Normed(backend, 1.0, 4), x),
        backend.ops.layer(Normed(backend, 1.0, 6), torch.ones(3, 6).to(DEVICE)),
    )
    assert len(backend.hpu_ops.regions.known) == 2
    longer = Normed(backend, 1.0)
    longer.several.append(longer.pair[0])
    backend.ops.layer(longer, x)
    assert len(backend.hpu_ops.regions.known) == 3, "the number of parts of a list is a part of its kind"


def test_a_card_without_values_runs_one_of_equal_layers(hpu: Any) -> None:
    """Layers with parts in tuples and lists, too: of another one the recorded figures count again."""
    backend = hpu(computes=False)
    equal, other = Normed(backend, 1.0), Normed(backend, 1.0)
    assert signature(equal) == signature(Normed(backend, 2.0)) != signature(Normed(backend, 1.0, 6))
    other.several.append(other.pair[0])
    assert signature(equal) != signature(other)
