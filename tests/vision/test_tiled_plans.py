"""Plans of the families of tiles and lines: what is counted is what a start takes, and no image compiles anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vision import test_plans
from tests.vision.tiled_families import COMPARED

CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "llava-v1.6-mistral-7b": {
        "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next", "image_token_index": 32000,
        "text_config": {
            "model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
            "vocab_size": 32064,
        },
        "vision_config": CLIP, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    },
    "InternVL3-1B": {
        "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "image_token_id": 151667,
        "text_config": {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151674,
        },
        "vision_config": {"model_type": "internvl_vision", "attention_bias": True}, "tie_word_embeddings": True,
    },
    "SmolVLM": {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "image_token_id": 49153,
        "scale_factor": 3,
        "text_config": {
            "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
            "num_attention_heads": 32, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 273768,
            "vocab_size": 49155,
        },
        "vision_config": {
            "model_type": "idefics3", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        },
    },
    "MiniCPM-V-4.6": {
        "architectures": ["MiniCPMV4_6ForConditionalGeneration"], "model_type": "minicpmv4_6",
        "image_token_id": 248056, "insert_layer_id": 6, "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "vocab_size": 248320,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
        },
        "vision_config": {
            "model_type": "minicpmv4_6_vision", "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        },
    },
    "Mistral-Small-3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
        "spatial_merge_size": 2, "vision_feature_layer": -1, "multimodal_projector_bias": False,
        "text_config": {
            "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
            "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "head_dim": 64, "hidden_act": "silu", "image_size": 1540, "patch_size": 14,
            "rope_theta": 1e4,
        },
    },
    "Phi-3.5-vision": {
        "architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", "embd_pdrop": 0.0, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False,
        "vocab_size": 32064,
        "rope_scaling": {"type": "su", "short_factor": [1.08] * 48, "long_factor": [4.0] * 48},
        "embd_layer": {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
            "use_hd_transform": True, "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": 1024, "model_name": "openai/clip-vit-large-patch14-336", "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
    },
}  # fmt: skip
"""What their config.json say, as far as it matters."""


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def write(family: str) -> Path:
        first = next(iter(COMPARED[family].forms.values()))
        return COMPARED[family].write(tmp_path_factory.mktemp(family), **first)

    return cache(write)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", HUB)
def test_a_plan_is_the_start(tmp_path: Path, name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_plans.HUB, name, HUB[name])
    test_plans.compare(tmp_path, name, ranks)


def test_a_plan_of_tiles_is_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share: cells of 9 patches, which do not divide a window."""
    monkeypatch.setitem(test_plans.HUB, "SmolVLM", HUB["SmolVLM"])
    test_plans.compare(tmp_path, "SmolVLM", 1)


@pytest.mark.long
@pytest.mark.parametrize("family", COMPARED)
def test_nothing_compiles_in_300_requests(family: str, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    found = test_plans.served(written(family), "llava", 300, 768)  # two images of Idefics3 take more than 384
    print(f"\n{family}: {found} compilations in 300 requests")
    assert found == 0


def test_an_image_of_tiles_compiles_nothing(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the above: images of up to 13 tiles, spread over launches."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    assert test_plans.served(written("internvl"), "llava", 4) == 0
