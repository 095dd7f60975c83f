"""OPT and GPT-2 on several ranks give the tokens of one: learned positions, plain MLPs, ids that nothing divides."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import empty

from tests.families.text_checkpoints import family_checkpoint
from tests.oracles.transformers_model import Answer, assert_same
from trencadis import LLM, SamplingParams

pytestmark = pytest.mark.long

BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=384, max_num_seqs=8, max_num_batched_tokens=128, kv_cache_memory_bytes=32 << 20
)
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {}, "cpu, preemption": {"num_gpu_blocks_override": 40},
    "emulated hpu": {"device": "hpu", "warmup": "skip", "block_size": 64},
    "twin of a card": {"device": "cuda", "warmup": "skip"},
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "opt": ({"num_hidden_layers": 2}, {"tensor_parallel_size": 4}),
    "gpt2": ({"n_layer": 4}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
}
"""Settings of the checkpoint, and how its ranks are asked for."""

PROMPTS = int(os.environ.get("TRENCADIS_TEST_PROMPTS", "200"))
PART = 50
"""Prompts of one test: eight ranks on two busy cores take minutes for them, and a run may go on with the next part."""
VOCAB = {"opt": 50_272, "gpt2": 50_257}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=5, max_tokens=12, n=2)
TIES = 0.01
"""Share of draws that another order of summation may let fall the other way."""


def prompts(vocab: int) -> list[list[int]]:
    """``PROMPTS`` of 1 to 200 ids of the whole vocabulary; each second one begins as the one before."""
    rng = np.random.default_rng(3)
    found: list[list[int]] = []
    for i in range(PROMPTS):
        length = int(rng.integers(1, 201))
        shared = found[-1][: length // 2] if i % 2 else []
        found.append([*shared, *rng.integers(0, vocab, length - len(shared)).tolist()])
    found[0][-1] = vocab - 1
    return found


def answered(path: Path, requested: list[list[int]], **flags: Any) -> tuple[list[Answer], list[list[int]], int]:
    llm = LLM(str(path), **{**BASE, **flags})
    try:
        greedy = []
        for one in llm.generate(requested, GREEDY, use_tqdm=False):
            (out,) = one.outputs
            assert out.logprobs is not None
            gaps = [x.top_logprobs[0] - x.top_logprobs[1] for x in out.logprobs]
            greedy.append(Answer(out.token_ids, gaps, empty(0)))
        drawn = [c.token_ids for o in llm.generate(requested, DRAWN, use_tqdm=False) for c in o.outputs]
        llm.engine.scheduler.check()
        return greedy, drawn, llm.engine.scheduler.totals.preemptions
    finally:
        llm.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, list[list[int]], Any]]:
    """A family's checkpoint, a part of what is asked, and what one rank on the CPU answers."""

    @cache
    def checkpoint(family: str) -> Path:
        form = {"opt": "125m", "gpt2": "tied"}[family]
        settings = {**SHAPES[family][0], "vocab_size": VOCAB[family]}
        return family_checkpoint(tmp_path_factory.mktemp(family), family=family, form=form, **settings)

    @cache
    def find(family: str, first: int) -> Any:
        requested = prompts(VOCAB[family])[first : first + PART]
        return checkpoint(family), requested, answered(checkpoint(family), requested)

    return find


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", range(0, PROMPTS, PART))
@pytest.mark.parametrize("family", SHAPES)
def test_two_hundred_prompts(family: str, first: int, device: str, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    path, requested, (wanted, wanted_drawn, _) = alone(family, first)
    ours, drawn, preempted = answered(path, requested, **SHAPES[family][1], **DEVICES[device])
    assert_same([(a.tokens, b) for a, b in zip(ours, wanted, strict=True)])
    other = sum(a != b for a, b in zip(drawn, wanted_drawn, strict=True))
    figures = f"{len(ours)} greedy, {len(drawn)} drawn, {other} differ, {preempted} preemptions"
    print(f"\n{family}, {device}, prompts from {first} on: {figures}")
    assert other <= TIES * len(drawn)
    assert preempted or "preemption" not in device
