"""Every vision family at a size of the hub: what its config.json says, as far as plans need it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vision import test_plans, test_tiled_plans
from tests.vision.cross_attention import test_plans as test_crossing_plans
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.model_config import ModelConfig

_MISTRAL, _SMOL = test_tiled_plans.HUB["Mistral-Small-3.1"], test_tiled_plans.HUB["SmolVLM"]
_QWEN2 = test_plans.HUB["Qwen2-VL-2B"]
HUB: dict[str, dict[str, Any]] = {
    **test_plans.HUB,
    **test_tiled_plans.HUB,
    test_crossing_plans.NAME: test_crossing_plans.HUB,
    "Qwen2.5-VL-3B": _QWEN2 | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
            "spatial_patch_size": 14, "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
    },
    "Idefics3-8B": _SMOL | {
        "scale_factor": 2, "vision_config": _SMOL["vision_config"] | {"image_size": 364},
    },
    "SmolVLM2-2.2B": _SMOL | {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm"},
    "Pixtral-12B": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 10,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "text_config": _MISTRAL["text_config"] | {"intermediate_size": 14336},
        "vision_config": _MISTRAL["vision_config"] | {"image_size": 1024, "patch_size": 16},
    },
}  # fmt: skip


def hub_config(name: str, folder: Path) -> ModelConfig:
    """Its configuration, read from ``folder``; there is no file of its image processor: plans take the usual one."""
    (folder / "config.json").write_text(json.dumps(HUB[name]))
    return load_config(folder)
