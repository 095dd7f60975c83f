"""Chats and raw prompts on every device and schedule, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles.transformers_model import assert_same, conversation, make_image
from tests.vision.cross_attention.mllama_oracle import BASE, FIRST, FORMS, START, MllamaOracle
from tests.vision.family_harness import VARIANTS
from trencadis import LLM, SamplingParams
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.errors import BadRequest, TrencadisError

SCHEDULES: dict[str, dict[str, Any]] = {
    **{name: flags for name, flags in VARIANTS.items() if name != "arena of two"},
    "arena of three": {"encoder_cache_images": 3, "enable_prefix_caching": False},
    "arena of two": {"encoder_cache_images": 2, "enable_prefix_caching": False},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "few blocks": {"num_gpu_blocks_override": 16, "block_size": 16, "max_model_len": 256},
}


def chats(path: Path, reference: MllamaOracle, seeds: range, **flags: Any) -> Any:
    """Ids equal, and the same tokens as transformers; twice, the second time behind hits of the prefix cache."""
    requested = []
    for seed in seeds:
        most = min(int(flags.get("encoder_cache_images", 3)), 3)  # a request with more than the arena holds is refused
        messages, images = conversation(np.random.default_rng(seed), most, high=300)
        requested.append((messages, *reference.answer(reference.text(messages), images, 6)))
    llm = LLM(str(path), **{**BASE, **flags})
    try:
        for _ in range(2):
            conversations = [messages for messages, _, _ in requested]
            got = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
            assert [o.prompt_token_ids for o in got] == [ids for _, ids, _ in requested]
            assert sum(o.num_image_tokens > 0 for o in got) >= len(got) // 2
            assert_same([(o.outputs[0].token_ids, answer) for o, (_, _, answer) in zip(got, requested, strict=True)])
        llm.engine.scheduler.check()
        return llm.engine.scheduler.totals.preemptions, llm.engine.scheduler.totals.prefix_hits
    finally:
        llm.close()


@pytest.mark.parametrize("variant", ["padded, chunks of 7", "arena of three", "emulated hpu"])
def test_chats_answer_as_transformers(variant: str, made: Any, reference: Any, monkeypatch: Any) -> None:
    """A share: each schedule or device with one of the forms."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    form = list(FORMS)[list(SCHEDULES).index(variant) % len(FORMS)]
    preemptions, hits = chats(made(form), reference(form), range(5), **SCHEDULES[variant])
    assert (hits if variant != "arena of three" else preemptions) > 0


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", [*SCHEDULES, "two ranks"])
def test_forty_chats(variant: str, form: str, made: Any, reference: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    chats(made(form), reference(form), range(100, 140), **SCHEDULES.get(variant, {"tensor_parallel_size": 2}))


def ask_raw(path: Path, reference: MllamaOracle, text: str, images: list[Any], **flags: Any) -> None:
    """A raw prompt's answer as transformers'."""
    ids, answer = reference.answer(text, images, 6)
    llm = LLM(str(path), **{**BASE, **flags})
    try:
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": images}}
        got = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0]
        assert got.prompt_token_ids == ids
        assert_same([(got.outputs[0].token_ids, answer)])
    finally:
        llm.close()


def test_neighbours_are_seen_together_and_equal_ones_twice(path: Path, reference: Any) -> None:
    rng = np.random.default_rng(11)
    one, two = make_image(rng, high=200), make_image(rng, high=200)
    text = f"{START}What? <|image|><|image|><|image|> and <|image|> which is it?"
    ask_raw(path, reference(FIRST), text, [one, two, one, two])


def test_a_raw_prompt_counts_its_images(path: Path) -> None:
    image = make_image(np.random.default_rng(4), high=90)
    llm = LLM(str(path), **{**BASE, "encoder_cache_images": 2})
    try:
        with pytest.raises(BadRequest, match="placed 2 of 1 images"):
            prompt: Any = {"prompt": f"{START}<|image|><|image|> one?", "multi_modal_data": {"image": image}}
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        typed = [{"role": "user", "content": "<|image|> is text"}]
        got = llm.chat(typed, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
        assert max(got) < load_config(path).text.vocab
        other, third = (make_image(np.random.default_rng(seed), high=90) for seed in (5, 6))
        text = f"{START}<|image|><|image|><|image|> which?"
        with pytest.raises(TrencadisError, match="image arena"):
            prompt = {"prompt": text, "multi_modal_data": {"image": [image, other, third]}}
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        prompt = {"prompt": text, "multi_modal_data": {"image": [image, image, other]}}
        assert llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    finally:
        llm.close()


def test_choices_of_a_request_share_its_images(path: Path, reference: Any) -> None:
    """Four choices, penalties for ids of the prompt, and an image's mark that no head has a row for."""
    image = make_image(np.random.default_rng(6), high=200)
    text = f"{START}<|image|>What is it?"
    _, answer = reference(FIRST).answer(text, [image], 4)
    llm = LLM(str(path), **BASE)
    try:
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": image}}
        got = llm.generate(prompt, SamplingParams(temperature=0, n=4, max_tokens=4), use_tqdm=False)[0]
        assert_same([(one.token_ids, answer) for one in got.outputs])
        params = SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.3, max_tokens=4)
        assert len(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids) > 0
        llm.engine.scheduler.check()
    finally:
        llm.close()
