"""Adapters on emulated cards: the same tokens, the ledger to the byte, and no compilation after warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lora.conftest import Adapter, Base
from tests.lora.test_same_tokens import Greedy, Merged, compare, mixed, request_of
from trencadis import LLM, SamplingParams
from trencadis.core.buckets import LORA

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
    store = llm.engine.executor._rank.adapters  # type: ignore[attr-defined]
    assert ledger_of(llm)["adapters"] == store.nbytes
    rng, counters = np.random.default_rng(0), llm.engine.stats().graphs
    prompts = [rng.integers(0, 300, int(rng.integers(1, 200))).tolist() for _ in range(count)]
    kinds = [request_of(adapters[i]) if (i := int(rng.integers(-2, 4))) >= 0 else None for _ in range(count)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False, lora_request=kinds)
    stats = llm.engine.stats()
    assert stats.graphs.recompiles == counters.recompiles and stats.graphs.lazy_compiles == counters.lazy_compiles
    used = [use.bucket for use in stats.buckets]
    assert all(use.planned for use in stats.buckets)
    assert any(name.endswith(f"/{LORA}") for name in used) and not all(name.endswith(f"/{LORA}") for name in used)
