"""Results of Steps over stages: the last one's cross whole, both ends count, and a dead stage ends the group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tests.fakes import ranks as fake_ranks
from tests.fakes.ranks import full_step
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor import rank_messages
from trencadis.core.executor.multiproc_executor import MultiprocExecutor, RankFailed
from trencadis.core.executor.rank_info_and_fingerprint import RankInfo
from trencadis.core.launches.pipeline_transfer import StageOutputs
from trencadis.core.step_output import HeadOutput, StepOutput, StepStats, TargetScores

SOON = 5.0
"""Seconds in which a failure must be known: it settles for 0.3."""


def head(*tokens: int) -> HeadOutput:
    count = len(tokens)
    values = np.arange(count, dtype=np.float32)
    wide = np.arange(count * 20).reshape(count, 20)
    ids = np.array(tokens, np.int32)
    return HeadOutput(ids, values, ids + 1, wide.astype(np.int32), wide.astype(np.float32))


def full_output(number: int) -> StepOutput:
    """With every field in use."""
    scores = TargetScores([3, 4], head(7, 8))
    pooled: Any = {5: np.array([[0.25, 1e-300]]), 6: np.array([[1.5], [2.5]], np.float32)}
    stats = [StepStats(Bucket(Stage.SAMPLE, (2,), "full"), 2, 2, "COMPILED", 0.5, False, "skip", 1, 2)]
    made = StepOutput(number, {1: 0, 2: 1}, head(9, 10), {1: scores}, {2: scores}, pooled, stats, {2: "no"})
    made.failed_at, made.text, made.forced = {2: 1}, {(1, 0), (9, 2)}, {1: (4, 5)}
    return made


def equal(a: Any, b: Any) -> None:
    """Value by value, with types of arrays."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            equal(a[key], b[key])
    elif hasattr(a, "__dataclass_fields__"):
        for field in fields(a):
            equal(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


def test_an_output_crosses_whole() -> None:
    output = full_output(4)
    message = rank_messages.decode_up(rank_messages.encode(rank_messages.StepAnswer.of(output)))
    assert isinstance(message, rank_messages.StepAnswer) and message.digest == rank_messages.digest(output)
    equal(message.output(), output)


@pytest.mark.parametrize("first", [True, False])
def test_a_step_is_over_when_both_ends_have_run_it(first: bool) -> None:
    """Its launches are those of both, each once."""
    found: dict[int, StepOutput] = {}

    def settle(future: Future[StepOutput], output: StepOutput) -> None:
        found[output.number] = output

    outcomes = StageOutputs(settle)
    text = StepStats(Bucket(Stage.DECODE, (2,)), 2, 2, "CAPTURED", 0.5)
    for number in (1, 2):
        outcomes.expect(number, Future())
        own, last = StepOutput(number, stats=[text]), full_output(number)
        last.stats.insert(0, text)
        ends = [lambda own=own: outcomes.from_first(own), lambda last=last: outcomes.from_last(last)]
        ends[0 if first else 1]()
        assert number not in found
        ends[1 if first else 0]()
        assert [s.bucket.stage for s in found[number].stats] == [Stage.DECODE, Stage.SAMPLE]
        assert found[number].samples == {1: 0, 2: 1}


@pytest.fixture
def group() -> Iterator[Callable[..., MultiprocExecutor]]:
    made: list[MultiprocExecutor] = []

    def make(mode: str = "", tensor: int = 1) -> MultiprocExecutor:
        config = EngineConfig(policy=mode, pipeline_parallel_size=3, tensor_parallel_size=tensor)
        made.append(MultiprocExecutor(config, "tests.fakes.ranks:make"))
        made[-1].start(lambda place: fake_ranks.make(config, place))
        return made[-1]

    yield make
    for one in made:
        one.close()
        processes: list[Any] = [c.process for c in one.children]
        assert all(p.returncode is not None for p in processes)


def test_the_last_stage_answers(group: Any) -> None:
    """What rank 0 has drawn does not count; ranks of stages that draw nothing are compared with nobody."""
    ranks = group()
    assert [c.rank_info.stage for c in ranks.children] == [1, 2] and [c.rank_info.encodes for c in ranks.children] == [
        False
    ] * 2
    outputs = [ranks.submit(full_step(n)) for n in range(1, 6)]
    lean = fake_ranks.make(EngineConfig(), RankInfo())
    for n, output in enumerate(outputs, 1):
        found = output.result()
        wanted = lean.execute(rank_messages.without_pixels(full_step(n))).result()
        assert found.number == n and found.head.token.tolist() == wanted.head.token.tolist()
    assert not ranks._digests


@pytest.mark.parametrize("mode", ["kill@1", "raise@2"])
def test_a_stage_that_dies_ends_the_group(group: Any, mode: str) -> None:
    ranks = group(mode)
    ranks.submit(full_step(2)).result()
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank {mode[-1]}"):
        for number in range(3, 10_000):
            ranks.submit(full_step(number)).result()
    assert time.monotonic() - begun < SOON


def test_places() -> None:
    """Ranks of a stage follow one another."""
    found = [RankInfo(n, 6, stages=3) for n in range(6)]
    assert [(p.stage, p.peer, p.draws, p.answers) for p in found] == [
        (0, 0, False, False), (0, 1, False, False), (1, 0, False, False), (1, 1, False, False), (2, 0, True, True),
        (2, 1, True, False),
    ]  # fmt: skip
    assert RankInfo().draws and not RankInfo().answers
