"""The bundled model over conversations with images: greedy and sampled answers with drafts are those without."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.traffic.image_chats import Chat, make_conversations
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path

FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "batch_invariant": True,
    "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "report", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


def params_of(seed: int) -> SamplingParams:
    """Greedy for every second seed, else with every sampling field."""
    rng = random.Random(seed)
    if seed % 2:
        return SamplingParams(temperature=0.0, max_tokens=24, logprobs=rng.choice([None, 2]))
    return SamplingParams(
        temperature=rng.choice([0.7, 1.0]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 20]),
        min_p=rng.choice([0.0, 0.05]), presence_penalty=rng.choice([0.0, 0.4]), seed=seed,
        frequency_penalty=rng.choice([0.0, 0.3]), repetition_penalty=rng.choice([1.0, 1.1]), max_tokens=24,
        logit_bias=rng.choice([None, {40: 2.0}]), min_tokens=rng.choice([0, 8]), stop=rng.choice([[], ["a"]]),
    )  # fmt: skip


def answers(chats: list[Chat], together: bool, tools: bool = False, **flags: Any) -> tuple[list[Any], int]:
    """Token ids, texts, ends and log-probabilities of all answers, and the drafts that were accepted."""
    llm = LLM(**{**FLAGS, **flags})
    try:
        params = [params_of(seed) for seed in range(len(chats))]
        more: dict[str, Any] = {"tools": [TOOL]} if tools else {}
        if together:
            outputs = llm.chat(chats, params, use_tqdm=False, **more)
        else:
            outputs = [llm.chat(one, p, use_tqdm=False, **more)[0] for one, p in zip(chats, params, strict=True)]
        llm.engine.scheduler.check()
        found = [
            (out.token_ids, out.text, out.finish_reason, out.stop_reason, repr(out.logprobs))
            for output in outputs
            for out in output.outputs
        ]
        return found, llm.engine.scheduler.totals.spec_accepted
    finally:
        llm.close()


def compare(count: int, together: bool, cases: list[dict[str, Any]], **more: Any) -> None:
    chats = make_conversations(range(count), high=224)
    plain, none = answers(chats, together, speculation=False, **more)
    assert not none
    for case in cases:
        drafted, accepted = answers(chats, together, spec_always=True, **case, **more)
        assert drafted == plain, case
        print(f"{count} conversations, together {together}, {case}: {accepted} drafts accepted")
        assert accepted


@pytest.mark.parametrize("together", [False, True])
def test_some_conversations_have_equal_answers(together: bool) -> None:
    compare(6, together, [{"spec_method": "ngram", "spec_tokens": 4, "ngram_prompt_lookup_min": 1}])


@pytest.mark.long
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("tools", [False, True])
def test_a_thousand_conversations_have_equal_answers(together: bool, tools: bool) -> None:
    cases: list[dict[str, Any]] = [
        {"spec_method": method, "spec_tokens": k} for method in ("ngram", "suffix") for k in (1, 3, 7)
    ]
    cases += [{"spec_model": str(demo_path()), "spec_tokens": k} for k in (1, 3, 7)]
    compare(250, together, cases, tools=tools)
