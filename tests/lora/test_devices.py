"""Adapters on emulated cards: the same tokens, the ledger to the byte, and no compilation after warm-up."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.adapters import LANGUAGE, TOWER
from tests.lora.conftest import Adapter, Base
from tests.lora.test_same_tokens import Greedy, Merged, compare, generate, mixed, request_of
from tests.oracles.transformers_model import assert_same, make_image
from tests.speculation.test_planned_devices import check_ledger
from trencadis import LLM, SamplingParams, StructuredOutputsParams
from trencadis.core.buckets import DRAFT, LORA, Stage

CARDS: dict[str, dict[str, Any]] = {
    "emulated hpu": {"device": "hpu", "warmup": "skip", "block_size": 64, "max_num_batched_tokens": 256},
    "compiled hpu": {"device": "hpu", "warmup": "skip", "block_size": 64, "max_num_batched_tokens": 256},
    "cuda twin": {"device": "cuda", "policy": "twin", "warmup": "skip", "block_size": 16},
}


@pytest.mark.parametrize("card", CARDS)
def test_the_same_tokens(
    base: Base, adapter: Adapter, greedy: Greedy, merged: Merged, monkeypatch: pytest.MonkeyPatch, card: str
) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if card == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    checkpoint = base("llama")
    compare(checkpoint, mixed(checkpoint, adapter, 2, 40), 3, greedy, merged, **CARDS[card])


def ledger_of(llm: LLM) -> dict[str, int]:
    graphs = llm.engine.info().graphs
    assert graphs is not None
    return {row.name: row.bytes for row in graphs.ledger}


@pytest.mark.parametrize("card", ["emulated hpu", "cuda twin", pytest.param("compiled hpu", marks=pytest.mark.long)])
def test_nothing_compiles_after_warm_up(
    base: Base, adapter: Adapter, monkeypatch: pytest.MonkeyPatch, card: str
) -> None:
    """Rows of adapters and of the base, prompts of any length, and uploads between them."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if card == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    checkpoint = base("llama")
    flags: dict[str, Any] = {**CARDS[card], "warmup": "full", "max_model_len": 256, "max_num_batched_tokens": 128}
    llm = LLM(
        str(checkpoint), dtype="bfloat16", max_num_seqs=4, enable_lora=True, max_loras=2, max_cpu_loras=4, **flags
    )
    drive(llm, [adapter(checkpoint, seed=i) for i in range(4)], 40)
    llm.close()


def drive(llm: LLM, adapters: list[Path], count: int) -> None:
    """Runs ``count`` requests and asserts that every launch was planned and nothing was compiled."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, int(rng.integers(1, 200))).tolist() for _ in range(count)]
    kinds = [request_of(adapters[i]) if (i := int(rng.integers(-2, 4))) >= 0 else None for _ in range(count)]

    def run() -> None:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False, lora_request=kinds)

    used = planned_launches(llm, run)
    assert any(name.endswith(f"/{LORA}") for name in used) and not all(name.endswith(f"/{LORA}") for name in used)


def planned_launches(llm: LLM, run: Callable[[], None], warm: bool = True) -> set[str]:
    """Buckets that ``run`` used; asserts that all were planned, the ledger's row, and no compilation if ``warm``."""
    rank = llm.engine.executor._rank  # type: ignore[attr-defined]
    assert ledger_of(llm)["adapters"] == rank.adapters.nbytes
    counters, before = llm.engine.stats().graphs, Counter(rank.graphs.hits)
    run()
    after = llm.engine.stats().graphs
    if warm:
        assert after.recompiles == counters.recompiles and after.lazy_compiles == counters.lazy_compiles
    used = {*(Counter(rank.graphs.hits) - before)}
    assert used <= rank.graphs.planned, used - rank.graphs.planned
    return {str(bucket) for bucket in used}


MIXED: dict[str, Any] = dict(
    dtype="bfloat16", warmup="full", max_model_len=256, max_num_batched_tokens=256, max_num_seqs=16, enable_lora=True,
    max_loras=3, max_cpu_loras=4, limit_mm_per_prompt={"image": 1}, kv_cache_memory_bytes=8 << 20,
    mm_processor_kwargs={"min_pixels": 56 * 56, "max_pixels": 20_000},
    speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}, spec_always=True,
)  # fmt: skip


TOGETHER = 250
"""Requests of the long run that are given at a time; those of every fourth time have no adapters."""


@pytest.mark.long
@pytest.mark.parametrize("card", CARDS)
def test_many_requests_of_all_kinds(base: Base, adapter: Adapter, monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    """Plain, ruled and verified rows and rows with images, of the base and of adapters of decoder and tower.

    Launches are full and most answers short, because an emulated launch takes as long for one row as for many.
    ``TRENCADIS_TEST_SEED`` draws other requests, so that the figure can be run in pieces.
    """
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if card == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    checkpoint, rng = base("qwen2_5_vl"), np.random.default_rng(int(os.environ.get("TRENCADIS_TEST_SEED", "1")))
    begun = time.monotonic()
    llm = LLM(str(checkpoint), **{**CARDS[card], **MIXED})
    print(f"{card}: started in {time.monotonic() - begun:.0f} s", flush=True)
    adapters = [adapter(checkpoint, seed=i, pattern=rf"{LANGUAGE}|{TOWER}" if i > 1 else LANGUAGE) for i in range(4)]
    images = [make_image(rng, low=60, high=140, aspect=1.5) for _ in range(12)]
    rules: list[dict[str, Any]] = [
        {}, {"allowed_token_ids": [30, 31], "max_tokens": 8}, {"temperature": 0.8, "top_k": 5, "seed": 1},
        {"structured_outputs": StructuredOutputsParams(regex="(ab|cd){2}")}, {"repetition_penalty": 1.2},
    ]  # fmt: skip

    def run() -> None:
        for number in range(int(os.environ.get("TRENCADIS_TEST_REQUESTS", "10000")) // TOGETHER):
            chats, params, kinds = [], [], []
            for _ in range(TOGETHER):
                words = "aa bb " * int(rng.integers(1, 12))
                parts: list[Any] = [{"type": "text", "text": words}]
                if rng.random() < 0.3:
                    parts.append({"type": "image", "image": images[int(rng.integers(len(images)))]})
                chats.append([{"role": "user", "content": parts}])
                length = int(rng.integers(1, 13 if rng.random() < 0.1 else 5))
                rule: dict[str, Any] = {"max_tokens": length, **rules[int(rng.integers(len(rules)))]}
                params.append(SamplingParams(**rule))
                one = int(rng.integers(-2, 4)) if number % 4 else -1
                kinds.append(request_of(adapters[one]) if one >= 0 else None)
            made = llm.chat(chats, params, use_tqdm=False, lora_request=kinds)
            assert all(m.outputs[0].finish_reason in ("stop", "length") for m in made)
            print(f"{card}: {TOGETHER * (number + 1)} requests, {time.monotonic() - begun:.0f} s", flush=True)

    try:
        used = planned_launches(llm, run)
        llm.engine.scheduler.check()
        stages = {name.partition("[")[0] for name in used}
        assert {"vision", "verify"} <= stages and llm.engine.stats().spec_accepted > 0, used
        assert any(name.startswith("vision") and name.endswith(LORA) for name in used), used
        check_ledger(llm.engine)
        launches = llm.engine.executor._rank.graphs.hits  # type: ignore[attr-defined]
        verified = sum(count for bucket, count in launches.items() if bucket.stage is Stage.VERIFY)
        adapted = sum(count for bucket, count in launches.items() if bucket.variant == LORA)
        print(f"{card}: {sum(launches.values())} launches, {verified} VERIFY, {adapted} with adapters, 0 compiled")
    finally:
        llm.close()


@pytest.mark.parametrize("warmup", ["skip", pytest.param("full", marks=pytest.mark.long)])
@pytest.mark.parametrize("card", ["cuda twin", *(pytest.param(c, marks=pytest.mark.long) for c in CARDS if "hpu" in c)])
def test_a_draft_model_drafts_as_the_base(
    base: Base,
    adapter: Adapter,
    greedy: Greedy,
    merged: Merged,
    monkeypatch: pytest.MonkeyPatch,
    card: str,
    warmup: str,
) -> None:
    """The base drafts for itself, so that all its drafts are right; adapters verify such drafts, most of them wrong."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    if card == "compiled hpu":
        monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    checkpoint = base("llama")
    rows, length = mixed(checkpoint, adapter, 2, 24)[3:], 6
    drafts = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 2}
    few = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 2, "num_gpu_blocks_override": 12}
    flags = {
        **CARDS[card],
        **few,
        "block_size": 16,
        "warmup": warmup,
        "speculative_config": drafts,
        "spec_always": True,
    }
    llm = LLM(str(checkpoint), dtype="float32", enable_lora=True, max_loras=2, **flags)
    ours: list[list[int]] = []
    try:
        used = planned_launches(llm, lambda: ours.extend(generate(llm, rows, length)), warmup == "full")
        accepted, drafted = (getattr(llm.engine.stats(), f"spec_{name}") for name in ("accepted", "draft_tokens"))
        check_ledger(llm.engine)
    finally:
        llm.close()
    folders = [checkpoint if one is None else merged(checkpoint, one) for _, one in rows]
    assert_same([(o, greedy(f, p, length)) for o, f, (p, _) in zip(ours, folders, rows, strict=True)])
    assert any(name.endswith(LORA) for name in used) and any(name.endswith(DRAFT) for name in used), used
    assert not any(LORA in name and DRAFT in name for name in used)
    assert 0 < accepted < drafted if card == "cuda twin" else 0 < accepted == drafted, (
        "only a Gaudi drafts base rows alone"
    )
