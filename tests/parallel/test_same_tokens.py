"""One model on several ranks gives the tokens of one rank: images, prefix hits, seeded sampling, both depths.

The ranks of ``make test`` also take what ``trencadis plan`` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import empty

from tests.oracles.transformers_model import Answer, assert_same
from tests.plan.planned_rows import assert_as_planned_on_a_card, assert_as_planned_on_the_cpu
from tests.traffic.image_chats import Chat, answers, make_conversations
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.errors import StartupError

BASE: dict[str, Any] = dict(
    dtype="float32", max_model_len=640, max_num_seqs=8, max_num_batched_tokens=256, kv_cache_memory_bytes=64 << 20,
    mm_processor_kwargs={"min_pixels": 56 * 56, "max_pixels": 50_176},
)  # fmt: skip
EMULATED: dict[str, Any] = dict(device="hpu", block_size=64, warmup="skip")
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.4, repetition_penalty=1.1, seed=11,
    logit_bias={7: 2.0}, max_tokens=16, n=2, logprobs=2,
)  # fmt: skip
TIES = 0.01
"""Share of draws that may fall the other way: another order of summation moves a boundary by some 1e-6."""


def chats(seeds: range) -> list[Chat]:
    return make_conversations(seeds, high=250)


def answered(llm: LLM, seeds: range) -> tuple[list[Answer], list[list[int]]]:
    """Greedy answers with the gaps of the two best, and drawn ones."""
    requested = chats(seeds)
    found = answers(llm, requested, GREEDY)
    drawn = [c.token_ids for o in llm.chat(requested, DRAWN, use_tqdm=False) for c in o.outputs]
    return found, drawn


Wanted = Callable[[range], tuple[list[Answer], list[list[int]]]]


@pytest.fixture(scope="module")
def wanted() -> Iterator[Wanted]:
    """One rank's answers on the CPU."""
    llm = LLM(str(demo_path()), **BASE)
    known: dict[range, tuple[list[Answer], list[list[int]]]] = {}

    def find(seeds: range) -> tuple[list[Answer], list[list[int]]]:
        if seeds not in known:
            known[seeds] = answered(llm, seeds)
        return known[seeds]

    yield find
    llm.close()


def same(llm: LLM, seeds: range, wanted: Wanted) -> tuple[int, int]:
    """Asserts it; returns how many answers were compared and how many drawn ones differ."""
    (greedy, drawn), (ours, ours_drawn) = wanted(seeds), answered(llm, seeds)
    assert_same([(a.tokens, b) for a, b in zip(ours, greedy, strict=True)])
    other = sum(a != b for a, b in zip(ours_drawn, drawn, strict=True))
    assert other <= TIES * len(drawn), f"{other} of {len(drawn)} drawn answers differ"
    llm.engine.scheduler.check()
    return len(greedy) + len(drawn), other


def same_of_many(llm: LLM, wanted: Wanted) -> str:
    """As ``same`` for 200 prompts, or as many as the variable says, 20 at a time; the figures."""
    count = int(os.environ.get("TRENCADIS_TEST_PROMPTS", "200"))
    compared = other = 0
    for start in range(0, count, 20):
        found = same(llm, range(start, min(start + 20, count)), wanted)
        compared, other = compared + found[0], other + found[1]
    return f"{compared} answers to {count} prompts, {other} drawn ones differ"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    monkeypatch.setenv("TRENCADIS_CACHE", str(tmp_path))
    made: list[LLM] = []

    def start(path: Path | None = None, **flags: Any) -> LLM:
        made.append(LLM(str(path or demo_path()), **{**BASE, **flags}))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


def test_two_ranks_on_the_cpu(wanted: Wanted, started: Any) -> None:
    llm = started(tensor_parallel_size=2)
    assert "2 ranks" in llm.engine.info().device
    assert_as_planned_on_the_cpu(llm, **BASE, device="cpu", tensor_parallel_size=2)
    same(llm, range(4), wanted)


def test_two_ranks_on_emulated_cards(wanted: Wanted, started: Any) -> None:
    """At depth 1, graphs made where they are first needed."""
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "async_depth": 1, **EMULATED}
    llm = started(**flags)
    assert_as_planned_on_a_card(llm, **BASE, **flags)
    same(llm, range(2), wanted)


def test_two_ranks_on_the_twin_of_a_card(wanted: Wanted, started: Any) -> None:
    """Replays reduce over the ranks again: the collectives are on the tape, and the tape waits for them."""
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cuda", "warmup": "skip"}
    llm = started(**flags)
    assert_as_planned_on_a_card(llm, **BASE, **flags)
    same(llm, range(2), wanted)


def test_sizes_that_do_not_fit_are_refused(started: Any) -> None:
    with pytest.raises(StartupError, match=r"--tensor-parallel-size 3 does not divide .* use 1, 2, 4\.$"):
        started(tensor_parallel_size=3)


def test_more_ranks_than_cards() -> None:
    from trencadis.backends.hpu.start.bridge_loader import check_cards

    with pytest.raises(StartupError, match=r"--tensor-parallel-size 16 needs 16 cards and there are 8\."):
        check_cards(8, 0, 16)


def test_batch_invariant_ranks(started: Any) -> None:
    """The bits of a request do not depend on its company, on two ranks either."""
    llm = started(tensor_parallel_size=2, batch_invariant=True)
    alone, _ = answered(llm, range(3, 4))
    for output in llm.chat(chats(range(4)), GREEDY, use_tqdm=False)[3:]:
        (out,) = output.outputs
        assert out.token_ids == alone[0].tokens and out.logprobs is not None
        assert [x.top_logprobs[0] - x.top_logprobs[1] for x in out.logprobs] == alone[0].gaps


LONG: dict[str, dict[str, Any]] = {
    "cpu, 2 ranks": {"tensor_parallel_size": 2},
    "cpu, 2 ranks, depth 1, padded, preemption": {
        "tensor_parallel_size": 2, "async_depth": 1, "policy": "padded", "num_gpu_blocks_override": 60,
    },
    "cpu, 4 ranks": {"tensor_parallel_size": 4},
    "hpu, 2 ranks, all captured": {"tensor_parallel_size": 2, **EMULATED, "warmup": "full"},
    "hpu, 2 ranks, background": {"tensor_parallel_size": 2, **EMULATED, "warmup": "background"},
    "hpu, 4 ranks": {"tensor_parallel_size": 4, **EMULATED},
    "twin of a card, 2 ranks": {"tensor_parallel_size": 2, "device": "cuda", "warmup": "full"},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_two_hundred_prompts(name: str, wanted: Wanted, started: Any) -> None:
    print(f"\n{name}: {same_of_many(started(**LONG[name]), wanted)}")


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_odd_shapes(world: int, checkpoint: Callable[..., Path], started: Any) -> None:
    """One KV head on every rank, an MLP width that no size divides, a vocabulary that leaves a short share."""
    path = checkpoint("qwen2", num_key_value_heads=1, intermediate_size=97, vocab_size=346)
    found = []
    for ranks in (1, world):
        llm = started(path, tensor_parallel_size=ranks, mm_processor_kwargs={})
        outputs = llm.generate([[i, 5, 9, 30 + i] for i in range(20)], GREEDY, use_tqdm=False)
        found.append([o.outputs[0] for o in outputs])
    for one, other in zip(*found, strict=True):
        gaps = [x.top_logprobs[0] - x.top_logprobs[1] for x in one.logprobs]
        assert_same([(other.token_ids, Answer(one.token_ids, gaps, empty(0)))])
