"""The same answer whatever the schedule: chunks, caches, preemption, a tiny arena, depth, policies, company, n."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.transformers_model import Answer, Oracle, assert_same, conversation
from tests.traffic.image_chats import Chat, answers, make_conversations
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.scheduling.sequence import uniform

LENGTH = 20
BASE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 20,
    "mm_processor_kwargs": {"max_pixels": 50_176},
    "max_model_len": 2048,
}
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=2, ignore_eos=True)

VARIANTS: dict[str, dict[str, Any]] = {
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "depth 1": {"async_depth": 1},
    "padded policy": {"policy": "padded"},
    "padded, depth 1, chunks of 33": {"policy": "padded", "async_depth": 1, "max_num_batched_tokens": 33},
    "blocks of 128": {"block_size": 128},
    "preemption": {"num_gpu_blocks_override": 40, "max_model_len": 640, "async_depth": 0},
    "preemption at depth 1": {"num_gpu_blocks_override": 40, "max_model_len": 640, "async_depth": 1},
    "arena of two images": {"encoder_cache_images": 2, "async_depth": 1},
    "preemption, arena of two": {
        "num_gpu_blocks_override": 40, "max_model_len": 640, "encoder_cache_images": 2, "enable_prefix_caching": False,
    },
}  # fmt: skip


def chats(seeds: range) -> list[Chat]:
    return make_conversations(seeds, high=400)


def each_alone(llm: LLM, requested: list[Chat]) -> list[Answer]:
    """One after another: what the variants are held to."""
    return [answers(llm, [chat], GREEDY)[0] for chat in requested]


@pytest.fixture(scope="module")
def base() -> Iterator[LLM]:
    llm = LLM(str(demo_path()), **BASE, async_depth=0)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def expected(base: LLM) -> Callable[[range], list[Answer]]:
    known: dict[int, Answer] = {}

    def find(seeds: range) -> list[Answer]:
        new = [s for s in seeds if s not in known]
        known.update(zip(new, each_alone(base, make_conversations(new, high=400)), strict=True))
        return [known[s] for s in seeds]

    return find


def run(name: str, seeds: range, expected: Callable[[range], list[Answer]]) -> LLM:
    llm = LLM(str(demo_path()), **{**BASE, **VARIANTS[name]})
    got = llm.chat(chats(seeds), GREEDY)
    assert_same([(g.outputs[0].token_ids, e) for g, e in zip(got, expected(seeds), strict=True)])
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.used == 0
    if "preemption" in name:
        assert llm.engine.scheduler.totals.preemptions > 0
    if "arena of two" in name:
        assert llm.engine.scheduler.arena.evictions > 0
    llm.close()
    return llm


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, expected: Callable[[range], list[Answer]]) -> None:
    """Seventeen chats at a time against each of them alone (fewer where each takes many steps)."""
    run(name, range({"chunks of 1": 5, "preemption, arena of two": 8}.get(name, 17)), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_long(name: str, expected: Callable[[range], list[Answer]]) -> None:
    for start in range(0, 300, 20):
        run(name, range(start, start + 20), expected)


SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=40, min_p=0.02, presence_penalty=0.3, repetition_penalty=1.1, seed=7,
    max_tokens=LENGTH, ignore_eos=True, n=4,
)  # fmt: skip


def near_a_boundary(oracle: Oracle, prompt: list[int], out: list[int], at: int, choice: int, other: int) -> bool:
    """Whether the uniform number lies within 1e-4 of the boundary between the two tokens drawn (plain temperature)."""
    with torch.inference_mode():
        logits = oracle.model(input_ids=torch.tensor([prompt + out[:at]])).logits[0, -1].double()
    edges = logits.softmax(-1).cumsum(-1)
    u = uniform(7, choice, at)
    low, high = sorted((out[at], other))
    return any(abs(u - float(edges[i])) < 1e-4 for i in range(low, high))


@pytest.mark.parametrize("name", ["chunks of 7", "depth 1", "padded policy", "preemption", "no prefix cache"])
def test_seeded_sampling(name: str, base: LLM) -> None:
    """Four choices with every filter and penalty on: the same draws alone and in company, preempted or not."""
    requested = chats(range(40, 42))
    alone = [base.chat([c], SAMPLED)[0] for c in requested]
    llm = LLM(str(demo_path()), **{**BASE, **VARIANTS[name]})
    together = llm.chat(requested, SAMPLED)
    same = total = 0
    for a, b in zip(alone, together, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            total += 1
            same += x.token_ids == y.token_ids
    assert same >= total - 1, f"{total - same} of {total} draws differ"
    assert len({tuple(o.token_ids) for o in alone[0].outputs}) > 1, "the choices of a request are different draws"
    llm.close()


def test_a_plain_draw_differs_only_at_a_boundary(base: LLM) -> None:
    oracle = Oracle(demo_path())
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, n=2)
    llm = LLM(str(demo_path()), **{**BASE, "policy": "padded", "async_depth": 1})
    for seed in (3, 5, 11):
        chat = conversation(np.random.default_rng(seed), most=0)[0]
        a, b = base.chat([chat], params)[0], llm.chat([chat], params)[0]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            for at, (s, t) in enumerate(zip(x.token_ids, y.token_ids, strict=True)):
                if s != t:
                    assert near_a_boundary(oracle, a.prompt_token_ids, x.token_ids, at, x.index, t)
                    break
    llm.close()


def test_offline_surface(base: LLM) -> None:
    """Strings, ids, image prompts, lists; log-probabilities; errors."""
    from PIL import Image

    from trencadis.core.errors import BadRequest

    image = Image.new("RGB", (120, 90), "red")
    chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What colour?"}]}]
    reported = base.chat(chat, SamplingParams(temperature=0, max_tokens=8))[0]
    marks = "<|vision_start|><|image_pad|><|vision_end|>"
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{marks}What colour?<|im_end|>\n<|im_start|>assistant\n"
    )
    raw = base.generate(
        {"prompt": text, "multi_modal_data": {"image": image}}, SamplingParams(temperature=0, max_tokens=8)
    )
    assert raw[0].prompt_token_ids == reported.prompt_token_ids and raw[0].outputs[0].text == reported.outputs[0].text
    prompts: list[Any] = ["Hello", [5, 6, 7]]
    two = base.generate(prompts, SamplingParams(temperature=0, max_tokens=3))
    assert len(two) == 2 and two[1].prompt_token_ids == [5, 6, 7] and len(two[0].outputs[0].token_ids) <= 3
    scored = base.generate("Hello there", SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    with pytest.raises(BadRequest):
        base.generate({"prompt": "no place for it", "multi_modal_data": {"image": image}})
    stopped = base.generate("Hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=["e"]))[0]
    assert stopped.outputs[0].finish_reason in ("stop", "length") and "e" not in stopped.outputs[0].text
