"""Thousands of requests to each family of 2026 compile nothing after warm-up and leave the ledger true to the byte.

On the emulated Gaudi in both modes, on cards without values, and on the twin of an NVIDIA card, which computes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._dynamo.utils import counters

from tests.families.text_checkpoints import family_checkpoint
from tests.hpu.conftest import run_in_pieces
from tests.oracles.transformers_model import QUESTIONS, make_image
from tests.speculation.test_planned_devices import check_ledger
from tests.vision import vision_checkpoints
from tests.vision.all_families.test_two_hundred_prompts import WRITERS as COMPARED
from trencadis import LLM, SamplingParams
from trencadis.core.buckets import Stage

LENGTH, TOGETHER = 512, 200
"""Tokens of the longest sequence, and requests that are given at a time."""

WRITERS: dict[str, Callable[[Path], Path]] = COMPARED | {
    "Gemma-4 12B": partial(vision_checkpoints.gemma4, unified=True),
    "LFM2-VL": vision_checkpoints.lfm2_vl,
    "Granite 4 with experts": partial(
        family_checkpoint, family="granite_hybrid", form="experts, two groups, rotary, biases"
    ),
}
CARDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "lazy hpu": ({"PT_HPU_LAZY_MODE": "1"}, {"device": "hpu", "block_size": 64, "num_gpu_blocks_override": 36}),
    "compiled hpu": ({"PT_HPU_LAZY_MODE": "0"}, {"device": "hpu", "block_size": 64, "num_gpu_blocks_override": 36}),
    "cuda twin": ({}, {"device": "cuda", "policy": "twin", "block_size": 16, "num_gpu_blocks_override": 144}),
}
"""Variables and flags of three devices with planned shapes; sequences of half the length are preempted."""

RULES: tuple[dict[str, Any], ...] = (
    {}, {}, {"temperature": 0.8, "top_k": 5, "seed": 1}, {"repetition_penalty": 1.2, "logprobs": 2},
    {"allowed_token_ids": [30, 31]}, {"temperature": 1.0, "logit_bias": {7: 1.0}, "frequency_penalty": 0.5},
)  # fmt: skip
QUICK = {("LFM2-VL", "cuda twin"), ("small Gemma-4", "lazy hpu")}
"""What runs in the fast suite."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``written(family)``: a small checkpoint of it, written once."""
    return cache(lambda family: WRITERS[family](tmp_path_factory.mktemp("family")))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, Path], LLM]:
    """``start(card, path)``: an engine after its whole warm-up."""

    def make(card: str, path: Path) -> LLM:
        variables, flags = CARDS[card]
        for name, value in {"TRENCADIS_HPU_EMULATOR": "1", "TRENCADIS_HPU_EMULATOR_KIND": "meta",
                            "TRENCADIS_CACHE": str(tmp_path), **variables}.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        return LLM(
            str(path), dtype="bfloat16", max_model_len=LENGTH, max_num_seqs=8, max_num_batched_tokens=256,
            warmup="full", **flags,
        )  # fmt: skip

    return make


def compiled_of(llm: LLM) -> tuple[int, ...]:
    """What was compiled so far: by the backend's count, by the engine's, and by Dynamo's."""
    graphs = llm.engine.stats().graphs
    backend = llm.engine.executor._rank.graphs.backend  # type: ignore[attr-defined]
    return backend.compilations(), graphs.recompiles, graphs.lazy_compiles, counters["stats"]["unique_graphs"]


def serve(llm: LLM, count: int, rng: np.random.Generator, images: list[Any]) -> None:
    """Prompts of random ids, and chats of which half show one or two of ``images``; half with rules of their own."""
    shown = count * 3 // 10 if images else 0
    params = [
        SamplingParams(max_tokens=int(rng.integers(1, 5)), ignore_eos=True, **RULES[int(rng.integers(len(RULES)))])
        for _ in range(count)
    ]
    drawn = [rng.integers(5, 250, rng.integers(1, 400)).tolist() for _ in range(count - shown)]
    for at in range(2, len(drawn), 5):
        drawn[at] = drawn[at - 2][: LENGTH // 2] + drawn[at][:100]  # a prefix that is known
    prompts = [{"prompt_token_ids": ids} for ids in drawn]
    made = llm.generate(prompts, params[shown:], use_tqdm=False)
    if shown:
        chats = []
        for _ in range(shown):
            parts: list[Any] = [{"type": "text", "text": QUESTIONS[int(rng.integers(len(QUESTIONS)))]}]
            for _ in range(int(rng.integers(0, 3))):
                part = {"type": "image", "image": images[int(rng.integers(len(images)))]}
                parts.insert(int(rng.integers(0, len(parts) + 1)), part)
            chats.append([{"role": "user", "content": parts}])
        made += llm.chat(chats, params[:shown], use_tqdm=False)
    assert all(one.outputs[0].finish_reason == "length" for one in made)


def check_requests(llm: LLM, count: int, seed: int, label: str) -> None:
    """Runs ``count`` requests; after each piece nothing was compiled, all launches were planned, and bytes add up."""
    rank = llm.engine.executor._rank  # type: ignore[attr-defined]
    rng = np.random.default_rng(seed)
    sees = rank.model.config.vision is not None
    images = [make_image(rng, low=40, high=160, aspect=2.5) for _ in range(40)] if sees else []
    before, hits = compiled_of(llm), Counter(rank.graphs.hits)

    def piece(done: int) -> int:
        size = min(TOGETHER, count - done)
        serve(llm, size, np.random.default_rng([seed, done]), images)
        assert compiled_of(llm) == before, label
        llm.engine.scheduler.check()
        check_ledger(llm.engine)
        return size

    check_ledger(llm.engine)
    begun = time.monotonic()
    run_in_pieces(f"{label}, {count} requests", count, piece)
    used = Counter(rank.graphs.hits) - hits
    assert {*used} <= rank.graphs.planned
    assert any(bucket.stage is Stage.VISION for bucket in used) == sees or not used
    print(f"{label}: {sum(used.values())} launches in {time.monotonic() - begun:.0f} s, 0 compiled after {before[0]}")


@pytest.mark.parametrize(
    ("family", "card"),
    [pytest.param(f, c, marks=() if (f, c) in QUICK else pytest.mark.long) for f in WRITERS for c in CARDS],
)
def test_many_requests_compile_nothing(family: str, card: str, written: Any, start: Any) -> None:
    """``TRENCADIS_TEST_REQUESTS`` is the count of the long run (10,000), ``TRENCADIS_TEST_SEED`` draws others."""
    few = "24" if (family, card) in QUICK else "10000"
    count, seed = (int(os.environ.get(f"TRENCADIS_TEST_{name}", kept)) for name, kept in
                   (("REQUESTS", few), ("SEED", "1")))  # fmt: skip
    llm = start(card, written(family))
    try:
        check_requests(llm, count, seed, f"{family}, {card}")
    finally:
        llm.close()
