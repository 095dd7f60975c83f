"""Chats with a video through qwen-vl-utils and transformers, float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.oracles import qwen_vl_utils
from tests.oracles.transformers_model import Oracle

LIMITS: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 50_176}
"""Of the demo's images, which its frames keep as well."""


def video_inputs(oracle: Oracle, messages: list[dict[str, Any]], video: np.ndarray, rate: float) -> dict[str, Any]:
    """Inputs of a chat with one video: ``video`` is float [n, 3, h, w] taken at ``rate``, as qwen-vl-utils gives it."""
    values, grid = qwen_vl_utils.pixel_values(video)
    text = oracle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, after = text.split("<|video_pad|>")
    text = before + "<|video_pad|>" * (grid[0] * grid[1] * grid[2] // 4) + after
    encoded = oracle.tokenizer(text, return_tensors="pt")
    pad = oracle.tokenizer.convert_tokens_to_ids("<|video_pad|>")
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "pixel_values_videos": values,
        "video_grid_thw": torch.tensor([grid]),
        "second_per_grid_ts": torch.tensor([2 / rate]),
        "mm_token_type_ids": (encoded["input_ids"] == pad).int() * 2,
    }


def chat(video: Any, question: str = "What is in the video?", **options: Any) -> list[dict[str, Any]]:
    """A chat about a video."""
    return [
        {
            "role": "user",
            "content": [{"type": "video", "video": video, **options}, {"type": "text", "text": question}],
        }
    ]
