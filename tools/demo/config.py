"""The dimensions of the model, and its configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.images.scene import CELL, MAX_CELLS
from demo.language.tokenizer import LEARNED, SPECIALS, VOCAB

TEXT, TEXT_LAYERS, TEXT_MLP = 256, 4, 512
Q_HEADS, KV_HEADS, HEAD = 4, 2, 64
THETA, SECTIONS = 1000.0, (2, 5, 25)
VISION, VISION_LAYERS, VISION_MLP = 192, 4, 512
VISION_HEADS, VISION_HEAD = 4, 48
FULL_BLOCKS = (1, 3)
WINDOW = 4  # cells along one side of a window: 112 pixels
PATCH = 14
EPS = 1e-6
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
IDS: dict[str, int] = {s: LEARNED + i for i, s in enumerate(SPECIALS)}


def model_config() -> dict[str, Any]:
    """config.json, in the flat layout of the hub's Qwen2.5-VL with the nested text part beside it."""
    text = {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": TEXT,
        "intermediate_size": TEXT_MLP,
        "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "max_window_layers": TEXT_LAYERS,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "mrope_section": list(SECTIONS)},
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|im_end|>"],
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "depth": VISION_LAYERS,
        "hidden_size": VISION,
        "intermediate_size": VISION_MLP,
        "num_heads": VISION_HEADS,
        "out_hidden_size": TEXT,
        "fullatt_block_indexes": list(FULL_BLOCKS),
        "hidden_act": "silu",
        "in_channels": 3,
        "in_chans": 3,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": CELL * WINDOW,
        "tokens_per_second": 2,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|im_end|>"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def write(folder: Path) -> None:
    """Writes config.json, generation_config.json and preprocessor_config.json."""
    generation = {
        "bos_token_id": IDS["<|endoftext|>"], "eos_token_id": [IDS["<|im_end|>"], IDS["<|endoftext|>"]],
        "pad_token_id": IDS["<|endoftext|>"], "do_sample": False,
    }  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 4 * CELL * CELL,
        "max_pixels": MAX_CELLS * CELL * CELL,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    for name, content in (
        ("config", model_config()),
        ("generation_config", generation),
        ("preprocessor_config", processor),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
