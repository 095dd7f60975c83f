"""Offline answers against transformers, float32: prompt ids, pixel values, logits and greedy tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.transformers_model import Oracle, assert_same, conversation, same_tokens
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path

BIG = 1500 * 1500
LENGTH = 24


def perturbed(target: Path, seed: int = 0) -> Path:
    """The demo checkpoint with every weight moved a little: other answers, and no bias or norm that is trivial."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(demo_path(), target, dirs_exist_ok=True)
    g = torch.Generator().manual_seed(seed)
    file = target / "model.safetensors"
    moved = {
        k: (v.float() + 0.1 * v.float().std().nan_to_num(0.1) * torch.randn(v.shape, generator=g)).to(v.dtype)
        for k, v in load_file(file).items()
    }
    save_file(moved, file, metadata={"format": "pt"})
    return target


class Pair:
    """The same checkpoint in both."""

    def __init__(self, path: Path, **flags: Any) -> None:
        self.path = path
        self.oracle = Oracle(path, min_pixels=56 * 56, max_pixels=BIG)
        limits = {"min_pixels": 56 * 56, "max_pixels": BIG}
        self.flags = {"dtype": "float32", "kv_cache_memory_bytes": 128 << 20, "mm_processor_kwargs": limits, **flags}
        self.llm = LLM(str(path), **self.flags)

    def check(self, seeds: range, **size: Any) -> list[str]:
        """Chats of ``seeds``: equal ids and pixels, same tokens. Returns the verdicts."""
        requested, pairs = [], []
        for seed in seeds:
            messages, images = conversation(np.random.default_rng(seed), **size)
            inputs = self.oracle.inputs(messages, images)
            requested.append((messages, inputs, self.oracle.answer(inputs, LENGTH)))
        params = SamplingParams(temperature=0, max_tokens=LENGTH)
        got = self.llm.chat([m for m, _, _ in requested], params)
        for output, (_, inputs, answer) in zip(got, requested, strict=True):
            assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
            pairs.append((output.outputs[0].token_ids, answer))
        assert_same(pairs)
        return [same_tokens(*p) for p in pairs]


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    pair = Pair(demo_path())
    yield pair
    pair.llm.close()


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(perturbed(tmp_path_factory.mktemp("perturbed")))
    yield pair
    pair.llm.close()


def test_demo_answers_equal_transformers(demo: Pair) -> None:
    demo.check(range(12), high=500)


def test_perturbed_answers_equal_transformers(moved: Pair) -> None:
    moved.check(range(100, 108), high=500)


def test_pixel_values_equal_transformers(demo: Pair) -> None:
    processor = demo.llm.service.images.processor
    for seed in range(12):
        _, images = conversation(np.random.default_rng(200 + seed))
        for image in images:
            ours = processor.prepare(image, "d")
            expected = demo.oracle.images(images=[image], return_tensors="np", **demo.oracle.pixels)
            assert tuple(expected["image_grid_thw"][0]) == ours.grid
            mean, std = np.array(processor.mean, np.float32), np.array(processor.std, np.float32)
            x = ours.pixels.reshape(-1, 3, 392).astype(np.float32)
            values = (x * np.float32(1 / 255) - mean[:, None]) / std[:, None]
            np.testing.assert_allclose(values.reshape(-1, 1176), expected["pixel_values"], atol=1e-6)


def test_logits_of_prompt_and_answer(demo: Pair) -> None:
    """Log-probabilities of every prompt and answer token, which fix the logits up to a constant per token."""
    for seed in (1, 3, 7):
        messages, images = conversation(np.random.default_rng(seed), high=300)
        inputs = demo.oracle.inputs(messages, images)
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=20, prompt_logprobs=20)
        out = demo.llm.chat([messages], params)[0]
        tokens = out.prompt_token_ids + out.outputs[0].token_ids
        grown = dict(inputs, input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)).long())
        if "mm_token_type_ids" in inputs:
            pad = torch.zeros(1, len(tokens) - inputs["input_ids"].shape[1], dtype=torch.int32)
            grown["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], pad], 1)
        with torch.inference_mode():
            logits = demo.oracle.model(**grown).logits[0].float()
        scale = logits.abs().max().item()
        reference = logits.log_softmax(-1)
        assert out.prompt_logprobs is not None and out.outputs[0].logprobs is not None
        for at, item in enumerate([*out.prompt_logprobs, *out.outputs[0].logprobs]):
            if at == 0:
                assert item is None
                continue
            assert item is not None and item.token == tokens[at]
            assert abs(item.logprob - reference[at - 1, tokens[at]].item()) <= 1e-4 * scale
            ids = torch.tensor(item.top_ids)
            assert (torch.tensor(item.top_logprobs) - reference[at - 1, ids]).abs().max() <= 1e-4 * scale


SHAPES: dict[str, dict[str, Any]] = {
    "other heads": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "seed": 1},
    "gqa 7": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112, "seed": 2},
    "untied": {"tie_word_embeddings": False, "seed": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_random_checkpoints_equal_transformers(shape: str, checkpoint: Callable[..., Path]) -> None:
    pair = Pair(checkpoint("qwen2_5_vl", max_position_embeddings=32_768, **SHAPES[shape]))
    pair.check(range(300, 304), high=300)
    pair.llm.close()


@pytest.mark.long
@pytest.mark.parametrize("which", ["demo", "moved", *SHAPES])
def test_three_hundred_prompts(which: str, request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> None:
    """Images from 28 to 1,500 pixels a side, any aspect up to 20:1."""
    pair: Pair
    if which in SHAPES:
        pair = Pair(checkpoint("qwen2_5_vl", max_position_embeddings=32_768, **SHAPES[which]))
    else:
        pair = request.getfixturevalue(which)
    verdicts: list[str] = []
    for start in range(1000, 1300, 20):
        verdicts += pair.check(range(start, start + 20))
    print(f"{which}: {len(verdicts)} prompts, {verdicts.count('equal')} equal, {verdicts.count('tie')} ties")
