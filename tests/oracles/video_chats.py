"""Chats with a video through qwen-vl-utils and transformers, float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.oracles import qwen_vl_utils
from tests.oracles.transformers_model import Oracle, assert_same
from tests.traffic import video_clips
from trencadis import LLM, SamplingParams

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


def check_clip_answers(
    path: Path, cases: Sequence[tuple[int, float, int, int]], inputs_of: Callable[[Oracle, np.ndarray, float], Any],
    **flags: Any,
) -> None:  # fmt: skip
    """Asserts that chats about clips have transformers' prompts and greedy answers.

    Args:
        cases: (frames, frames a second, height, width) of each clip.
        inputs_of: (oracle, frames, frames a second) -> transformers' inputs.
        flags: further arguments of ``LLM``.
    """
    oracle, requested = Oracle(path), []
    for seed, (count, rate, height, width) in enumerate(cases):
        array = video_clips.frames(np.random.default_rng(seed), count, height, width)
        inputs = inputs_of(oracle, array, rate)
        requested.append((video_clips.animation(array, "WEBP", round(1000 / rate)), inputs, oracle.answer(inputs, 6)))
    llm = LLM(
        str(path), dtype="float32", max_model_len=2048, max_num_seqs=2, kv_cache_memory_bytes=32 << 20,
        **{"max_num_batched_tokens": 256, **flags},
    )  # fmt: skip
    try:
        messages = [chat(data) for data, _, _ in requested]
        got = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        for output, (_, inputs, _) in zip(got, requested, strict=True):
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        assert_same([(o.outputs[0].token_ids, answer) for o, (_, _, answer) in zip(got, requested, strict=True)])
    finally:
        llm.close()
