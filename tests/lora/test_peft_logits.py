"""Log-probabilities of all ids after each token are those of the model that peft merges an adapter into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.adapters import LANGUAGE, QWEN_TOWER, load_base, train_with_peft
from tests.lora.conftest import Base
from tests.lora.test_same_tokens import prompts, request_of
from tests.oracles.transformers_model import Oracle, make_image
from trencadis import LLM, LoRARequest, SamplingParams

pytest.importorskip("peft", reason="peft is among the packages of the tests: pip install peft")

MOST = 1e-4
"""Largest difference of a log-probability, float32."""

ENGINE: dict[str, Any] = dict(
    dtype="float32", max_model_len=384, max_num_seqs=6, kv_cache_memory_bytes=16 << 20, max_num_batched_tokens=256,
    enable_lora=True, max_logprobs=-1,
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 3},
    "rank 8": {"r": 8, "lora_alpha": 16},
    "rank 64": {"r": 64, "lora_alpha": 32},
    "rslora": {"r": 8, "lora_alpha": 4, "use_rslora": True},
    "patterns": {
        "r": 6, "lora_alpha": 8, "rank_pattern": {r"layers\.0\.self_attn\.\w+_proj": 3, r"layers\.1\.mlp\.\w+": 16},
        "alpha_pattern": {"down_proj": 5, r"layers\.1\.self_attn\.o_proj": 1},
    },
}  # fmt: skip
FAMILIES = ("llama", "qwen2_5_vl", "qwen3", "mistral", "gemma3", "phi3", "gemma4")
QUICK = {
    ("llama", "rank 1"), ("qwen2_5_vl", "rank 8"), ("qwen3", "rank 64"), ("mistral", "rslora"), ("gemma3", "patterns"),
}  # fmt: skip
"""Cases of ``make test``: each setting and five families."""

PLACES: dict[str, dict[str, Any]] = {
    "one rank": {}, "two ranks": {"tensor_parallel_size": 2}, "two stages": {"pipeline_parallel_size": 2},
}  # fmt: skip


def scores_of(made: Any) -> torch.Tensor:
    """Log-probabilities [positions, vocabulary] of an output: after each token of its prompt."""
    rows = [*made.prompt_logprobs[1:], *made.outputs[0].logprobs[:1]]
    return torch.tensor([[row[i].logprob for i in range(len(row))] for row in rows])


def score(llm: LLM, prompt: list[int], adapters: list[LoRARequest | None]) -> list[torch.Tensor]:
    """Has each adapter score one prompt, all in one batch; None: the base model."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1)
    asked = [{"prompt_token_ids": prompt, "cache_salt": str(i)} for i, _ in enumerate(adapters)]
    return [scores_of(one) for one in llm.generate(asked, params, use_tqdm=False, lora_request=adapters)]


def scores_of_theirs(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    """The same log-probabilities of a model of transformers."""
    with torch.inference_mode():
        return model(**inputs).logits[0].float().log_softmax(-1)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < MOST


CASES = [
    pytest.param(family, name, id=f"{family}, {name}", marks=[] if (family, name) in QUICK else [pytest.mark.long])
    for family in FAMILIES
    for name in SETTINGS
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_of_every_family(base: Base, tmp_path: Path, family: str, name: str) -> None:
    checkpoint, prompt = base(family), list(prompts(3, 60)[2])
    adapted = train_with_peft(load_base(checkpoint), tmp_path, LANGUAGE, **SETTINGS[name])
    llm = LLM(str(checkpoint), max_lora_rank=64, **ENGINE)
    try:
        ours, plain = score(llm, prompt, [request_of(tmp_path), None])
    finally:
        llm.close()
    ids = torch.tensor([prompt])
    with adapted.disable_adapter():
        assert_near(plain, scores_of_theirs(adapted, input_ids=ids))
    assert_near(ours, scores_of_theirs(adapted.merge_and_unload(), input_ids=ids))
    assert (ours - plain).abs().max() > 100 * MOST, "the adapter changes the answers"


@pytest.mark.parametrize("place", [p if p == "one rank" else pytest.param(p, marks=pytest.mark.long) for p in PLACES])
def test_of_ten_adapters_and_the_base_in_one_batch(base: Base, tmp_path: Path, place: str) -> None:
    checkpoint, prompt = base("llama"), list(prompts(3, 60)[2])
    model, count = load_base(checkpoint), 10
    folders = [tmp_path / str(i) for i in range(count)]
    settings = [*SETTINGS.values()]
    llm = LLM(str(checkpoint), max_lora_rank=64, max_loras=count, **{**ENGINE, "max_num_seqs": 11}, **PLACES[place])
    try:
        wants = []
        for number, folder in enumerate(folders):
            adapted = train_with_peft(model, folder, LANGUAGE, seed=number, **settings[number % len(settings)])
            adapted.merge_adapter()
            wants.append(scores_of_theirs(adapted, input_ids=torch.tensor([prompt])))
            adapted.unmerge_adapter()
            model = adapted.unload()
        founds = score(llm, prompt, [*map(request_of, folders), None])
    finally:
        llm.close()
    for found, want in zip(founds, [*wants, scores_of_theirs(model, input_ids=torch.tensor([prompt]))], strict=True):
        assert_near(found, want)
    assert len({round(float(found.sum()), 2) for found in founds}) == count + 1


@pytest.mark.parametrize("place", [p if p == "one rank" else pytest.param(p, marks=pytest.mark.long) for p in PLACES])
def test_of_the_tower_and_its_merger(base: Base, tmp_path: Path, place: str) -> None:
    checkpoint = base("qwen2_5_vl")
    adapted = train_with_peft(load_base(checkpoint), tmp_path, rf"{LANGUAGE}|{QWEN_TOWER}", r=8, lora_alpha=16)
    oracle = Oracle(checkpoint, min_pixels=56 * 56, max_pixels=40_000)
    image = make_image(np.random.default_rng(1), low=80, high=150, aspect=2)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the picture?"}]
    chat: list[Any] = [{"role": "user", "content": parts}]
    inputs = oracle.inputs(chat, [image])
    pixels: dict[str, Any] = {"mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 40_000}}
    llm = LLM(str(checkpoint), limit_mm_per_prompt={"image": 1}, **pixels, **ENGINE, **PLACES[place])
    try:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
        asked = [request_of(tmp_path), None]
        ours, plain = map(scores_of, llm.chat([chat] * 2, params, use_tqdm=False, lora_request=asked))
    finally:
        llm.close()
    with adapted.disable_adapter():
        assert_near(plain, scores_of_theirs(adapted, **inputs))
    assert_near(ours, scores_of_theirs(adapted.merge_and_unload(), **inputs))
    assert (ours - plain).abs().max() > 100 * MOST, "the adapter changes the answers"
