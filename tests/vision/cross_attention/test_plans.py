"""Plans of models whose layers attend to images: what is counted is what a start takes, and nothing compiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.meta_start import GIB, config_of, on_paper
from tests.vision import test_plans
from trencadis.backends.cuda.launches.bucket_capacity import cross_attention_bytes
from trencadis.backends.cuda.shape_policy import policy
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_registry import image_needs
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.errors import StartupError
from trencadis.core.memory.cache_plan import CacheOptions, plan_cpu
from trencadis.core.memory.memory_estimator import MemoryEstimator, arena_width

NAME = "Llama-3.2-11B-Vision"
TOWER: dict[str, Any] = {
    "model_type": "mllama_vision_model", "attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280,
    "image_size": 560, "intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120,
    "max_num_tiles": 4, "norm_eps": 1e-5, "num_channels": 3, "num_global_layers": 8, "num_hidden_layers": 32,
    "patch_size": 14, "vision_output_dim": 7680,
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
}  # fmt: skip
HUB: dict[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "image_token_index": 128256,
    "text_config": {
        "model_type": "mllama_text_model", "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "dropout": 0,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "tie_word_embeddings": False, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "vision_config": TOWER,
}  # fmt: skip
"""What its config.json says, as far as it matters."""

SHALLOW: dict[str, Any] = {
    **HUB,
    "text_config": {**HUB["text_config"], "num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
    "vision_config": {
        **TOWER, "num_hidden_layers": 4, "num_global_layers": 2, "intermediate_layers_indices": [1, 2],
        "vision_output_dim": 3840,
    },
}  # fmt: skip
"""The same with few layers."""


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))


def test_a_plan_is_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of the 11B in few layers."""
    monkeypatch.setitem(test_plans.HUB, NAME, SHALLOW)
    test_plans.compare(tmp_path, NAME, 1)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_of_the_11b_is_its_start(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_plans.HUB, NAME, HUB)
    test_plans.compare(tmp_path, NAME, ranks)


@pytest.fixture
def eleven(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    return load_config(tmp_path)


def test_an_image_of_the_11b_takes_200_mib_which_ranks_divide(eleven: Any) -> None:
    needs = image_needs(eleven, {})
    assert (needs.slots, needs.tokens) == (6528, 6404)
    assert 2 * needs.tokens * arena_width(eleven, 1) == 209_846_272 and arena_width(eleven, 1) == 16384
    assert [arena_width(eleven, ranks) for ranks in (2, 4, 8)] == [8192, 4096, 2048]


def test_buckets_stay_as_many_with_images(eleven: Any) -> None:
    """Text buckets for 0, 1, 4 and 16 images together are about as many as those of a model without."""
    plan = on_paper(eleven, config_of(max_num_seqs=32), image_needs(eleven, {}), 96 * GIB).plan
    text = [b for b in plan.buckets if b.stage in (Stage.FRESH, Stage.CONTEXT, Stage.DECODE)]
    by_units = {u: {(b.stage, b.dims) for b in text if planned_units(b.variant) == u} for u in (0, 1, 4, 16)}
    assert len(text) == sum(map(len, by_units.values())) and len(text) <= 260
    assert by_units[0] == by_units[1] == by_units[4] == by_units[16]


def test_too_small_a_device_is_refused_with_what_fits(eleven: Any) -> None:
    needs, config = image_needs(eleven, {}), config_of(max_model_len=4096, max_num_seqs=32)
    with pytest.raises(StartupError, match="needed before the KV cache") as refused:
        on_paper(eleven, config, needs, 22 * GIB)
    assert "\n" not in str(refused.value)
    requested = CacheOptions(16, 32, 1024, 1 << 30)
    with pytest.raises(StartupError, match=r"16 images .* are left; 10 fit"):
        plan_cpu(eleven, requested, 2, (23 << 30), needs.tokens)
    with pytest.raises(StartupError, match=r"not one fits, .* are missing"):
        plan_cpu(eleven, requested, 2, (21 << 30), needs.tokens)


def test_a_card_counts_partial_results_in_place_of_gathered_rows(eleven: Any) -> None:
    """Where keys and values of 16 images would be gathered, and the scores held, by every layer."""
    sizes = InputSizes(eleven.text.vocab, 16, 8192, 8, eleven.vision.slot, group=4, head_dim=128)
    assert (eleven.vision.slot.cross_attention_rows, policy("").cross_attention_bytes) == (6404, cross_attention_bytes)
    for bucket in (Bucket(Stage.DECODE, (32,), "pictures16"), Bucket(Stage.PREFILL, (2048, 32), "pictures16")):
        gathers = MemoryEstimator(eleven).activations(bucket, 16)
        reads = MemoryEstimator(eleven, cross_attention_bytes=cross_attention_bytes).activations(bucket, 16)
        plain = MemoryEstimator(eleven).activations(replace(bucket, variant=""), 16)
        assert gathers - reads > 800 << 20 and 0 <= reads - plain <= cross_attention_bytes(bucket, sizes) <= 80 << 20
        assert cross_attention_bytes(replace(bucket, variant=""), sizes) == 0


@pytest.mark.long
def test_a_plan_stands_or_is_refused_in_one_line_at_any_utilisation(eleven: Any) -> None:
    needs, stood, refused = image_needs(eleven, {}), 0, 0
    for utilisation in np.linspace(0.5, 0.99, 200):
        config = config_of(max_model_len=8192, max_num_seqs=32, gpu_memory_utilization=float(utilisation))
        for total in (40, 96):
            try:
                rows = dict(on_paper(eleven, config, needs, total * GIB).ledger.rows())
                assert sum(rows.values()) == total * GIB or rows["margin"] >= 0
                stood += 1
            except StartupError as error:
                assert "\n" not in str(error)
                refused += 1
    print(f"\n{stood} plans stand, {refused} are refused")
    assert stood >= 200


@pytest.mark.long
def test_nothing_compiles_in_300_requests(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    assert test_plans.served(path, "llava", 300) == 0
