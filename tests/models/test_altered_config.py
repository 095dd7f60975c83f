"""Each altered key of config.json is right, as transformers is, or refused with key and value; never wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.altered_config import GONE, Case, altered, verdict
from trencadis.assets import demo_path

RIGHT, REFUSED = "right", "refused"
NAN = math.nan

ANY: list[tuple[str, Any, str]] = [
    ("hidden_act", "gelu", RIGHT), ("hidden_act", "swish", RIGHT), ("hidden_act", None, REFUSED),
    ("hidden_act", GONE, RIGHT), ("rms_norm_eps", 1e-3, RIGHT), ("rms_norm_eps", NAN, REFUSED),
    ("rms_norm_eps", "1e-6", REFUSED), ("rms_norm_eps", 0, REFUSED), ("rms_norm_eps", -1e-6, REFUSED),
    ("rms_norm_eps", GONE, REFUSED), ("num_attention_heads", 0, REFUSED), ("num_attention_heads", -4, REFUSED),
    ("num_attention_heads", 3, REFUSED), ("num_attention_heads", 8, REFUSED), ("num_attention_heads", True, REFUSED),
    ("num_attention_heads", "4", REFUSED), ("num_key_value_heads", 1, REFUSED), ("num_key_value_heads", 0, REFUSED),
    ("num_key_value_heads", 3, REFUSED), ("num_key_value_heads", None, REFUSED), ("num_hidden_layers", 1, RIGHT),
    ("num_hidden_layers", 0, REFUSED), ("num_hidden_layers", 9, REFUSED), ("num_hidden_layers", -1, REFUSED),
    ("num_hidden_layers", 2.0, REFUSED), ("num_hidden_layers", 10**9, REFUSED), ("hidden_size", -64, REFUSED),
    ("hidden_size", 128, REFUSED), ("hidden_size", 0, REFUSED), ("intermediate_size", -1, REFUSED),
    ("intermediate_size", 100, REFUSED), ("vocab_size", 0, REFUSED), ("vocab_size", 100_000, REFUSED),
    ("max_position_embeddings", 512, RIGHT), ("max_position_embeddings", 0, REFUSED),
    ("max_position_embeddings", "many", REFUSED), ("max_position_embeddings", None, REFUSED),
    ("use_sliding_window", True, REFUSED), ("use_sliding_window", "no", REFUSED), ("sliding_window", 4, RIGHT),
    ("max_window_layers", 0, RIGHT), ("layer_types", ["sliding_attention"] * 4, REFUSED),
    ("layer_types", "full_attention", REFUSED), ("head_dim", 6, REFUSED), ("head_dim", 7, REFUSED),
    ("attention_dropout", 0.5, RIGHT), ("initializer_range", 0.5, RIGHT), ("use_cache", False, RIGHT),
    ("an_unknown_key", {"a": [1]}, RIGHT), ("tie_word_embeddings", "yes", REFUSED),
    ("rope_parameters.rope_theta", 5e4, RIGHT), ("rope_parameters.rope_theta", 0, REFUSED),
    ("rope_parameters.rope_theta", NAN, REFUSED), ("rope_parameters.rope_theta", GONE, RIGHT),
    ("rope_parameters.rope_type", "yarn", REFUSED), ("rope_parameters.rope_type", "dynamic", REFUSED),
    ("rope_parameters.rope_type", "longrope", REFUSED),
    ("rope_parameters.rope_type", None, REFUSED), ("rope_parameters.partial_rotary_factor", 0.5, REFUSED),
    ("rope_parameters.partial_rotary_factor", 1.0, RIGHT), ("partial_rotary_factor", 0.25, REFUSED),
    ("rope_parameters", [], REFUSED), ("rope_parameters.full_attention", {"rope_type": "default"}, REFUSED),
]  # fmt: skip
"""Of a decoder, wherever its settings lie."""

SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
LLAMA: list[tuple[str, Any, str]] = [
    *((key, value, RIGHT if value in ("yarn", "dynamic") else expected) for key, value, expected in ANY),
    ("rope_scaling", {"type": "linear", "factor": 3.0}, RIGHT), ("rope_scaling", {"factor": 2.0, **SCALED}, RIGHT),
    ("rope_scaling", {**SCALED, "factor": 0}, REFUSED),
        ("rope_scaling", {**SCALED, "high_freq_factor": 1.0}, REFUSED),
    ("rope_scaling", {"type": "mrope", "mrope_section": [2, 3, 3]}, REFUSED),
    ("rope_parameters.original_max_position_embeddings", 32, RIGHT), ("original_max_position_embeddings", 16, RIGHT),
    ("rope_parameters.original_max_position_embeddings", GONE, RIGHT), ("rope_parameters.factor", GONE, REFUSED),
    ("rope_parameters.low_freq_factor", 0, REFUSED), ("attention_bias", True, REFUSED), ("mlp_bias", True, REFUSED),
    ("attention_bias", "false", REFUSED), ("mlp_bias", 0, REFUSED), ("pretraining_tp", 2, RIGHT),
    ("tie_word_embeddings", True, RIGHT), ("model_type", "mistral", REFUSED), ("dtype", "int8", REFUSED),
    ("architectures", ["MistralForCausalLM"], REFUSED), ("architectures", 5, REFUSED),
    ("quantization_config", {"quant_method": "aqlm"}, REFUSED), ("quantization_config", "fp8", REFUSED),
    ("num_key_value_heads", GONE, REFUSED), ("rope_parameters.rope_type", "linear", RIGHT),
    ("eos_token_id", [2, 3], RIGHT), ("bos_token_id", 5, RIGHT),
]  # fmt: skip
ROPE = {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def vision_cases(section: list[int], written: bool = True) -> list[tuple[str, Any, str]]:
    """Those of a vision-language model whose axes have ``section``."""
    turned = [section[1], section[0], section[2]]
    vision: list[tuple[str, Any, str]] = [
        ("hidden_act", "gelu", REFUSED), ("hidden_act", "gelu_pytorch_tanh", REFUSED), ("hidden_act", "swish", RIGHT),
        ("depth", 2, RIGHT), ("depth", 99, REFUSED), ("depth", 0, REFUSED), ("num_heads", 1, RIGHT),
        ("num_heads", 0, REFUSED), ("num_heads", 5, REFUSED), ("hidden_size", 48, REFUSED),
        ("hidden_size", -8, REFUSED), ("intermediate_size", 0, REFUSED), ("out_hidden_size", 96, REFUSED),
        ("fullatt_block_indexes", [], RIGHT),
        ("fullatt_block_indexes", [0, 2], RIGHT), ("fullatt_block_indexes", [1, 99], RIGHT),
        ("fullatt_block_indexes", "1", REFUSED),
        ("fullatt_block_indexes", [True], REFUSED),
        ("fullatt_block_indexes", GONE, REFUSED), ("window_size", 224, REFUSED), ("window_size", 56, REFUSED),
        ("window_size", 120, RIGHT), ("window_size", 0, REFUSED), ("patch_size", 16, REFUSED),
        ("patch_size", "14", REFUSED), ("spatial_merge_size", 1, REFUSED), ("temporal_patch_size", 1, REFUSED),
        ("in_channels", 4, REFUSED), ("in_chans", 1, RIGHT), ("spatial_patch_size", 7, RIGHT),
        ("tokens_per_second", 25, RIGHT), ("tokens_per_second", GONE, RIGHT), ("tokens_per_second", -1, REFUSED),
        ("tokens_per_second", NAN, REFUSED), ("tokens_per_second", None, REFUSED), ("rope_theta", 500.0, RIGHT),
        ("rope_parameters", {"rope_type": "axial", "rope_theta": 300.0}, RIGHT),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0}, REFUSED), ("num_hidden_layers", 1, REFUSED),
        ("head_dim", 8, REFUSED), ("an_unknown_key", 1, RIGHT),
    ]  # fmt: skip
    rotary: list[tuple[str, Any, str]] = [
        ("rope_parameters.mrope_section", turned, RIGHT), ("rope_parameters.mrope_section", [1, 1, 1], REFUSED),
        ("rope_parameters.mrope_section", [sum(section)], REFUSED), ("rope_parameters.mrope_section", None, REFUSED),
        ("rope_parameters.mrope_section", GONE, REFUSED), ("rope_scaling", {"type": "mrope", **ROPE}, RIGHT),
        ("rope_scaling", {"rope_type": "linear", "factor": 3.0, "mrope_section": turned}, RIGHT),
        ("rope_scaling", {**SCALED, "mrope_section": section}, RIGHT), ("attention_bias", False, RIGHT),
        ("rope_parameters.rope_type", "linear", REFUSED),
    ]  # fmt: skip
    # transformers writes layer_types, which must agree.
    layers = [("num_hidden_layers", 1, REFUSED if written else RIGHT)]
    decoder = [case for case in ANY if case[:2] != ("num_hidden_layers", 1)]
    rotary = [(k, {**v, "mrope_section": section} if k == "rope_scaling" else v, e) for k, v, e in rotary]
    return [
        *((f"text_config.{key}", value, expected) for key, value, expected in [*decoder, *layers, *rotary]),
        *((f"vision_config.{key}", value, expected) for key, value, expected in vision),
        ("model_type", "qwen2_vl", REFUSED), ("image_token_id", 5, REFUSED), ("image_token_id", -1, REFUSED),
        ("image_token_id", "x", REFUSED), ("video_token_id", 7, REFUSED), ("vision_start_token_id", 3, REFUSED),
        ("vision_end_token_id", 10**6, REFUSED), ("text_config", [], REFUSED), ("text_config", {}, REFUSED),
        ("vision_config", "none", REFUSED), ("vision_config", None, REFUSED), ("dtype", "float8", REFUSED),
        ("text_config.tie_word_embeddings", True, RIGHT), ("tie_word_embeddings", None, REFUSED),
        ("text_config.quantization_config", {"quant_method": "aqlm"}, REFUSED), ("hidden_act", "gelu", RIGHT),
    ]  # fmt: skip


CHECKPOINTS = ("demo", "qwen2_5_vl", "llama")


def cases(name: str) -> list[tuple[str, Any, str]]:
    return {"demo": vision_cases([2, 5, 25], False), "qwen2_5_vl": vision_cases([2, 3, 3]), "llama": LLAMA}[name]


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda name: Path(demo_path()) if name == "demo" else checkpoint(name)


def wrong(source: Path, tmp_path: Path, picked: list[tuple[str, Any, str]]) -> list[str]:
    """A line for each case that ends otherwise than it should."""
    lines = []
    for i, (key, value, expected) in enumerate(picked):
        case = Case(altered(source, tmp_path / str(i), "config.json", key, value), source)
        found = verdict(case.ours, case.reference, key)
        if found != expected:
            lines.append(f"{key} = {'(none)' if value is GONE else value!r}: {found}, expected: {expected}")
    return lines


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_sample_of_altered_keys(folder: Any, tmp_path: Path, name: str) -> None:
    picked = random.Random(f"{name} 11").sample(cases(name), 4)
    assert not wrong(folder(name), tmp_path, picked)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_altered_key(folder: Any, tmp_path: Path, name: str) -> None:
    assert len(cases(name)) > 30
    problems = wrong(folder(name), tmp_path, cases(name))
    assert not problems, "\n".join(problems)
