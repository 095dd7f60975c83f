"""Pipeline stages give the tokens of one rank: images, prefix hits, seeded sampling, chunks, preemption, masks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import empty

from tests.oracles.transformers_model import Answer, assert_same
from tests.parallel.test_same_tokens import BASE, EMULATED, Wanted, answered, same, same_of_many
from trencadis import LLM, SamplingParams
from trencadis.assets import demo_path
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.headless_ranks import HeadlessRanks, make_connect_infos
from trencadis.core.links.rank_placement import topology

TIGHT: dict[str, Any] = dict(num_gpu_blocks_override=44)
"""Preemption: too few blocks for what is asked at a time. Chunks: a step takes 256 tokens."""


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    """One rank on the CPU."""
    llm = LLM(str(demo_path()), **BASE)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    """Two stages, of which the first has most layers."""
    llm = LLM(str(demo_path()), pipeline_parallel_size=2, pipeline_layer_partition="3,1", **BASE, **TIGHT)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def wanted(one: LLM) -> Wanted:
    """One rank's answers."""
    return cache(lambda seeds: answered(one, seeds))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("TRENCADIS_CUDA_TWIN", "1")
    made: list[LLM] = []

    def start(path: Path | None = None, **flags: Any) -> LLM:
        made.append(LLM(str(path or demo_path()), **{**BASE, **flags}))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


def test_two_stages_on_the_cpu(wanted: Wanted, two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, prefix hits and draws; both stages have a step at a time."""
    flying, submit = [], two.engine._submit

    def counted(step: Any) -> None:
        submit(step)
        flying.append(len(two.engine._flying))

    monkeypatch.setattr(two.engine, "_submit", counted)
    same(two, range(4), wanted)
    assert max(flying) == 2
    assert two.engine.info().device.startswith("cpu (2 ranks")


def test_preemption(one: LLM, two: LLM) -> None:
    """Eight sequences of 100 tokens on 44 blocks of 16."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    requested = [[5 + i, 9, 30, 7] * 10 for i in range(8)]
    found = [[o.outputs[0] for o in llm.generate(requested, params, use_tqdm=False)] for llm in (one, two)]
    for a, b in zip(*found, strict=True):
        gaps = [x.top_logprobs[0] - x.top_logprobs[1] for x in a.logprobs or []]
        assert_same([(b.token_ids, Answer(a.token_ids, gaps, empty(0)))])
    assert two.engine.scheduler.totals.preemptions > 0
    two.engine.scheduler.check()


def test_what_the_last_stage_alone_knows(one: LLM, two: LLM) -> None:
    """Masks, ids that are scored, log-probabilities of the prompt, and what a launch was."""
    requested = [
        SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[40, 41, 42, 43]),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1, logprobs=2),
        SamplingParams(temperature=0, max_tokens=6, logit_bias={77: 5.0}, min_tokens=6),
    ]
    found = []
    for llm in (one, two):
        llm.engine.stats()
        outputs = llm.generate([[5, 9, 30 + i] for i in range(3)], requested, use_tqdm=False)
        scores = [[round(x.logprob, 3) for p in (o.prompt_logprobs or []) if p for x in p.values()] for o in outputs]
        found.append(([o.outputs[0].token_ids for o in outputs], scores))
        assert {b.stage for b in llm.engine.stats().buckets} >= {"prefill", "decode", "sample"}
    assert found[0] == found[1] and any(found[0][1])


@pytest.mark.parametrize("stages", [5])
def test_more_stages_than_layers_are_refused(stages: int, started: Any) -> None:
    with pytest.raises(StartupError, match=r"--pipeline-parallel-size 5 is more than the 4 layers"):
        started(pipeline_parallel_size=stages)


@pytest.mark.long
def test_stages_on_two_machines(wanted: Wanted, started: Any, tmp_path: Path) -> None:
    """Rank 1 comes over TCP, and rows cross from one machine to the other."""
    key = tmp_path / "group.key"
    key.write_text("pZ4 a line that nobody else has, and which is long enough for a key")
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags: dict[str, Any] = dict(pipeline_parallel_size=2, nnodes=2, group_key_file=str(key), master_port=port)
    there = EngineConfig(model=str(demo_path()), **{**BASE, **flags}, node_rank=1, headless=True)
    far = HeadlessRanks(make_connect_infos(there, topology(there, {}), {}, 120.0))
    try:
        llm = started(**flags)
        same(llm, range(4), wanted)
        (child,) = llm.engine.executor.children  # type: ignore[attr-defined]
        assert child.remote and child.rank_info.stage == 1 and not child.rank_info.encodes
    finally:
        far.close()


LONG: dict[str, dict[str, Any]] = {
    "cpu, 2 stages": {"pipeline_parallel_size": 2},
    "cpu, 2 stages, padded, preemption": {"pipeline_parallel_size": 2, "policy": "padded", **TIGHT},
    "cpu, 4 stages": {"pipeline_parallel_size": 4},
    "cpu, 4 stages, preemption": {"pipeline_parallel_size": 4, **TIGHT},
    "cpu, 2 stages of 2 ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "hpu, 2 stages, all captured": {"pipeline_parallel_size": 2, **EMULATED, "warmup": "full"},
    "hpu, 2 stages of 2 ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **EMULATED},
    "hpu, 4 stages": {"pipeline_parallel_size": 4, **EMULATED},
    "twin of a card, 2 stages": {"pipeline_parallel_size": 2, "device": "cuda", "warmup": "skip"},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_two_hundred_prompts(name: str, wanted: Wanted, started: Any) -> None:
    llm = started(**LONG[name])
    figures = same_of_many(llm, wanted)
    preempted = llm.engine.scheduler.totals.preemptions
    print(f"\n{name}: {figures}, {preempted} preemptions")
