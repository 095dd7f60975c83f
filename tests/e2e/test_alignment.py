"""``--image-alignment resize``: chats against transformers fed with sides that are multiples of 112."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.oracles.transformers_model import Oracle, assert_same, conversation, same_tokens
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path

LOW, HIGH, LENGTH = 56 * 56, 448 * 448, 16
FLAGS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "image_alignment": "resize", "max_model_len": 2048,
    "mm_processor_kwargs": {"min_pixels": LOW, "max_pixels": HIGH}, "max_num_seqs": 8,
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "padded": {"policy": "padded"},
    "hpu": {"device": "hpu", "enforce_eager": True, "max_num_batched_tokens": 512, "block_size": 128},
}


def aligned(image: Image.Image) -> Image.Image:
    """The image at the size that the reference's formula gives for a factor of 112."""
    height, width = smart_resize(image.height, image.width, 112, LOW, HIGH)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def check(path: Path, seeds: range, **flags: Any) -> list[str]:
    oracle = Oracle(path, min_pixels=LOW, max_pixels=2 * HIGH)
    llm, requested, answers, slots = LLM(str(path), **FLAGS, **flags), [], [], 0
    try:
        for seed in seeds:
            messages, images = conversation(np.random.default_rng(seed), high=500, aspect=6.0)
            inputs = oracle.inputs(messages, [aligned(i) for i in images])
            if images:
                assert (inputs["image_grid_thw"][:, 1:] % 8 == 0).all(), "the oracle must see whole windows"
                slots += int(inputs["image_grid_thw"].prod(1).sum())
            requested.append((messages, inputs))
            answers.append(oracle.answer(inputs, LENGTH))
        llm.engine.stats()
        got = llm.chat([m for m, _ in requested], SamplingParams(temperature=0, max_tokens=LENGTH))
        vision = [use for use in llm.engine.stats().buckets if use.stage == "vision"]
    finally:
        llm.close()
    for output, (_, inputs) in zip(got, requested, strict=True):
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert slots and sum(use.real for use in vision) == slots, "no slot of a window is padding"
    pairs = [(o.outputs[0].token_ids, a) for o, a in zip(got, answers, strict=True)]
    assert_same(pairs)
    return [same_tokens(*p) for p in pairs]


def test_chats_equal_transformers(vl_checkpoint: Path) -> None:
    check(vl_checkpoint, range(500, 505))


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_many_chats_equal_transformers(device: str) -> None:
    verdicts = check(demo_path(), range(600, 640), **DEVICES[device])
    print(f"resize, {device}: {len(verdicts)} prompts, {verdicts.count('equal')} equal, {verdicts.count('tie')} ties")
