"""What ``trencadis plan`` counts for a vision family is what a start takes; warmed up, a card compiles nothing more."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.meta_start import GIB, card, config_of, on_paper, run
from tests.oracles.transformers_model import conversation
from tests.vision.vision_checkpoints import gemma3, gemma4, glm4v, llava, qwen3_vl
from trencadis import LLM, SamplingParams
from trencadis.backends.cpu import make_backend
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs
from trencadis.core.device.backend import BackendConfig
from trencadis.core.engine.startup_plan import StartupPlan
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models.model_loader import load_model

BEFORE = ("used by others", "weights", "image arena", "sampler state", "hidden rows", "static inputs")
ROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
QWEN3: dict[str, Any] = {
    "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5e6, "vocab_size": 151936,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}  # fmt: skip
QWEN3_TOWER: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "Qwen2-VL-2B": {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_size": 1536,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
        "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "rope_scaling": ROPE, "tie_word_embeddings": True,
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    },
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
        "text_config": {
            "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064,
        },
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        },
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 262144,
        "boi_token_index": 255999, "eoi_token_index": 256000, "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "Qwen3-VL-8B": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "text_config": QWEN3 | {
            "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        "vision_config": QWEN3_TOWER | {"out_hidden_size": 4096},
    },
    "Qwen3-VL-30B-A3B": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
        "text_config": QWEN3 | {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
            "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True,
        },
        "vision_config": QWEN3_TOWER | {"out_hidden_size": 2048},
    },
}  # fmt: skip
"""What their config.json say, as far as it matters."""

SMALL: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 256}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {}, "qwen2_vl": {"tie_word_embeddings": True}, "llava": {"image": 56}, "qwen3_vl": {},
    "qwen3_vl_moe": {"experts": True}, "gemma3": {}, "gemma4": {}, "glm4v": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def written(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def write(kind: str) -> Path:
        for name, form in (
            ("llava", llava), ("qwen3_vl", qwen3_vl), ("gemma3", gemma3), ("gemma4", gemma4), ("glm4v", glm4v),
        ):  # fmt: skip
            if kind.startswith(name):
                return form(tmp_path_factory.mktemp(kind), **KINDS[kind])
        return checkpoint(kind, **KINDS[kind])

    return write


def compare(folder: Path, name: str, ranks: int) -> None:
    """A first start equals the plan in all that stands before the profile; the next plan equals it in every row."""
    (folder / "config.json").write_text(json.dumps(HUB[name]))
    more = {"max_num_batched_tokens": 512} if name.startswith("gemma") else {}  # an image and every other row
    model, config = load_config(folder), config_of(graph_reserved_mem=0.2, **{**SMALL, **more})
    requested = {"max_pixels": 200_704} if name.startswith("Qwen") else {}
    needs = image_needs(model, requested)
    first = on_paper(model, config, needs, 96 * GIB, ranks)
    started = run(model, config, needs, card(96 * GIB), ranks)
    paper = dict(first.ledger.rows())
    assert {n: paper[n] for n in BEFORE} == {n: started.rows[n] for n in BEFORE}
    assert started.rows["activations and workspace"] <= paper["activations and workspace"] * 1.01
    captured, costs = set(started.runner.graphs.list_captured()), prices(first)
    # Graphs of ranks keep what they have each: at the edge of the reserve one more may fit where they are measured.
    assert costs.keys() <= captured and len(captured - costs.keys()) <= ranks - 1
    second = on_paper(model, config, needs, 96 * GIB, ranks)
    assert dict(second.ledger.rows()) == started.rows and not second.formula
    measured = prices(second)
    if ranks == 1:  # towers whose heads turn, whose heads do not, and with padding windows
        towers = [bucket for bucket in costs if bucket.stage is Stage.VISION]
        assert towers and all(abs(costs[b] / measured[b] - 1) < 1e-3 for b in towers)
    else:
        layered = [bucket for bucket in costs if bucket.stage in LAYERED]
        assert layered and all(abs(costs[b] / measured[b] - 1) < 0.025 for b in layered)


LAYERED = (Stage.VISION, Stage.CONTEXT, Stage.DECODE)


def prices(planned: StartupPlan) -> dict[Bucket, int]:
    """Bytes of each graph that a plan takes, with its workspace."""
    return {p.bucket: p.own + p.workspace for taken in planned.selection.taken.values() for p in taken}


@pytest.mark.parametrize("name", ["Qwen2-VL-2B", "llava-1.5-7b"])
def test_a_plan_is_the_start(tmp_path: Path, name: str) -> None:
    compare(tmp_path, name, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma-3-4b", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B"])
def test_the_plan_of_a_larger_model_is_its_start(tmp_path: Path, name: str) -> None:
    compare(tmp_path, name, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", HUB)
def test_a_plan_is_the_start_on_two_ranks(tmp_path: Path, name: str) -> None:
    compare(tmp_path, name, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_by_formula_are_the_models_bytes(kind: str, written: Any) -> None:
    config = load_config(written(kind))
    assert config.vision is not None
    model: Any = load_model(config, make_backend(BackendConfig(options={"threads": "1", "ops": "reference"})))
    # A tied table serves the embedding and the head, and is held once.
    twice = model.embedding.nbytes() if config.text.tied else 0
    frequencies = model.enter.rotary.nbytes() + config.vision.tables()
    assert MemoryEstimator(config, itemsize=4).weights() == model.nbytes() - twice + frequencies


def served(path: Path, kind: str, count: int, length: int = 384) -> int:
    """Compilations of a warmed-up card while it answers image chats, and launches that met a shape too late.

    A launch at any new shape would be one.
    """
    fixed = kind.startswith(("llava", "gemma"))
    limits: dict[str, Any] = {} if fixed else {"mm_processor_kwargs": {"max_pixels": 12_544}}
    llm = LLM(
        str(path), device="hpu", dtype="float32", max_model_len=length, max_num_seqs=2,
        max_num_batched_tokens=96 if kind == "gemma4" else 64, block_size=64, **limits,
    )  # fmt: skip
    requested = [conversation(np.random.default_rng(i), most=2, high=200)[0] for i in range(count)]
    rank = llm.engine.executor._rank  # type: ignore[attr-defined]
    bridge = rank.backend.bridge
    try:
        with bridge.metric_localcontext("graph_compilation") as metric:
            got = llm.chat(requested, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert sum(one.num_image_tokens > 0 for one in got) >= count // 3
        found: int = bridge.compilations(metric)
        return found + int(rank.graphs.lazy_compiles)
    finally:
        llm.close()


def test_nothing_compiles_after_warm_up(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share: the family whose images are tiles."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    assert served(written("llava"), "llava", 6) == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_compiles_in_300_requests(written: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    found = served(written(kind), kind, 300)
    print(f"\n{kind}: {found} compilations in 300 requests")
    assert found == 0
