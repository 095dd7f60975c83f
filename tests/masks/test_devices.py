"""Under a rule and a seed every device draws the same tokens, at both depths, on two ranks, whoever is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.rule_oracle import RuleOracle
from tests.traffic.ruled_requests import RuledTraffic, ruled_answers, vocabulary
from trencadis.core.config import EngineConfig
from trencadis.core.engine import Engine
from trencadis.core.startup.build import create_engine

LENGTH = 64
FLAGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "block_size": 16, "num_gpu_blocks_override": 8, "encoder_cache_images": 2,
    "mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
}  # fmt: skip
HPU: dict[str, Any] = {"device": "hpu", "warmup": "skip"}
TWIN: dict[str, Any] = {"device": "cuda", "policy": "twin"}
DEVICES: dict[str, dict[str, Any]] = {
    "cpu, depth 1": {"async_depth": 1},
    "cpu padded, depth 0": {"policy": "padded", "async_depth": 0},
    "cpu padded, depth 1": {"policy": "padded", "async_depth": 1},
    "cpu, chunks of 7": {"max_num_batched_tokens": 7, "async_depth": 1},
    "hpu, depth 0": {**HPU, "async_depth": 0},
    "hpu, depth 1": {**HPU, "async_depth": 1},
    "cuda, depth 0": {**TWIN, "async_depth": 0},
    "cuda, depth 1": {**TWIN, "async_depth": 1},
    "2 ranks, depth 0": {"tensor_parallel_size": 2, "async_depth": 0},
    "2 ranks, depth 1": {"tensor_parallel_size": 2, "async_depth": 1},
    "2 ranks of cuda": {**TWIN, "tensor_parallel_size": 2, "async_depth": 1},
}
TIES = 0.01
"""Share of draws that may fall the other way: another order of summation moves a boundary by some 1e-6."""

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(vl_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """``make(async_depth=1)``: an engine; ended with the test file."""
    made: list[Engine] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRENCADIS_HPU_EMULATOR", "1")
        patch.setenv("TRENCADIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("VLLM_MULTIMODAL_BUCKETS", "64,128,256")

        def create(**flags: Any) -> Engine:
            made.append(create_engine(EngineConfig(model=str(vl_checkpoint), **{**FLAGS, **flags})))
            return made[-1]

        yield create
        for engine in made:
            engine.close()


@pytest.fixture(scope="module")
def wanted(make: Make) -> Callable[[int, int], RuledTraffic]:
    """What the CPU answers at depth 0, checked against the rules themselves."""
    engine = make(async_depth=0)
    known: dict[tuple[int, int], RuledTraffic] = {}

    def find(count: int, seed: int) -> RuledTraffic:
        if (count, seed) not in known:
            run = known[count, seed] = ruled_answers(engine, count, seed, LENGTH, most=8, aborts=0)
            held_to_rules(run)
        return known[count, seed]

    return find


def held_to_rules(run: RuledTraffic) -> None:
    """Every token of every answer may be drawn, and every answer ends where and why it should."""
    limits = run.engine.scheduler.limits
    oracle = RuleOracle(vocabulary(run.vocab, limits.eos), limits.eos)
    for (request_id, choice), tokens in run.tokens.items():
        request = run.asked[request_id]
        if request.rule is not None:
            for at, token in enumerate(tokens):
                assert token in oracle.may_draw(request.rule, request.params, tokens[:at]), (request_id, choice, at)
                end = oracle.over(request.rule, request.params, tokens[: at + 1])
                assert end == ("" if at + 1 < len(tokens) else run.why[request_id, choice])


def compared(engine: Engine, count: int, seed: int, wanted: Callable[[int, int], RuledTraffic]) -> str:
    """Asserts the same tokens; what there was of rules, in a line."""
    want = wanted(count, seed)
    got = ruled_answers(engine, count, seed, LENGTH, most=8, aborts=0)
    other = sum(got.tokens[key] != tokens for key, tokens in want.tokens.items())
    assert set(got.tokens) == set(want.tokens) and other <= TIES * len(want.tokens), f"{other} of {len(want.tokens)}"
    ends = Counter(got.why.values())
    return f"{len(want.tokens)} answers, {other} differ, {engine.scheduler.preemptions} preemptions, {dict(ends)}"


@pytest.mark.parametrize("name", ["cpu padded, depth 1", "hpu, depth 1", "cuda, depth 1"])
def test_the_same_tokens_under_rules(name: str, make: Make, wanted: Callable[[int, int], RuledTraffic]) -> None:
    compared(make(**DEVICES[name]), 12, 0, wanted)


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
def test_three_hundred_prompts_under_rules(name: str, make: Make, wanted: Callable[[int, int], RuledTraffic]) -> None:
    print(f"\n{name}: {compared(make(**DEVICES[name]), 300, 1, wanted)}")
