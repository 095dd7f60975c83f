"""Steps in flight over several pipeline stages: they share no row, every answer is the oracle's, and no stage idles."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_schedules import play, random_request
from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from trencadis.core.request import Request, SamplingParams
from trencadis.core.step import Step


@pytest.mark.parametrize("stages", [2, 4])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_random_schedules(stages: int, seed: int) -> None:
    """Under little memory, with images, forks, priorities, aborts; a token that is not on the host fails the rank."""
    play(seed, 12, stages - 1, stages=stages)


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_ten_thousand_requests(stages: int) -> None:
    total = preempted = 0
    for seed in range(25):
        driver = play(3000 + seed, 400, stages - 1, stages=stages)
        total += len(driver.requests)
        preempted += driver.engine.scheduler.totals.preemptions
    print(f"{stages} stages: {total} requests, {preempted} preemptions")
    assert total == 10_000 and preempted > 100


@pytest.mark.parametrize("stages", [4, 8])
def test_freed_blocks_are_for_those_that_run(stages: int) -> None:
    """A sequence of one micro-batch that waits for a block gets it before a sequence that another micro-batch would
    begin.
    """
    engine, _ = shadow_engine(blocks=3, size=16, rows=2, depth=stages - 1, tokens=7, length=48, stages=stages)
    driver, rng = ScheduleDriver(engine, random.Random(1), 48), random.Random(1)
    for number, length in enumerate([24, 24] + 10 * [15]):
        params = SamplingParams(temperature=0, max_tokens=8, seed=1, ignore_eos=True)
        driver.add(Request(f"r{number}", [rng.randrange(1, VOCAB) for _ in range(length)], params))
    driver.finish(turns=400)
    driver.verify()
    assert engine.scheduler.totals.preemptions <= 2


def test_steps_in_flight_share_no_sequence() -> None:
    engine, _ = shadow_engine(blocks=40, size=4, rows=14, depth=2, stages=3, chunk=3)
    scheduler, rng = engine.scheduler, random.Random(3)
    schedule, most = scheduler.schedule, 0

    def checked() -> Step | None:
        nonlocal most
        step = schedule()
        if step is not None:
            *before, new = [{s.key for s in (*f.persistent, *f.scheduled)} for f in scheduler.in_flight]
            assert all(not new & other for other in before)
            most = max(most, len(scheduler.in_flight))
        scheduler.check()
        return step

    scheduler.schedule = checked  # type: ignore[method-assign]
    driver = ScheduleDriver(engine, rng, 96)
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(96)] for _ in range(2)]
    for number in range(40):
        driver.add(random_request(rng, number, 96, images=1, prefixes=prefixes))
        driver.run_step()
    driver.finish()
    driver.verify()
    assert most == 3


@dataclass
class Stages:
    """``count`` stages that take a second for each Step, one behind the other; tells when each was busy."""

    count: int
    now: float = 0.0
    free: list[float] = field(default_factory=list)
    busy: float = 0.0
    ends: deque[float] = field(default_factory=deque)

    def submit(self) -> None:
        """A Step enters now."""
        self.free = self.free or [0.0] * self.count
        at = self.now
        for stage in range(self.count):
            at = max(at, self.free[stage]) + 1.0
            self.free[stage] = at
        self.busy += self.count
        self.ends.append(at)

    def await_oldest(self) -> None:
        """Its result is there."""
        self.now = max(self.now, self.ends.popleft())


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("uneven", [False, True])
def test_two_rows_for_each_stage_keep_all_stages_busy(stages: int, uneven: bool) -> None:
    """On a virtual clock; ``uneven``: the rows of one micro-batch end first, and others take their place."""
    engine, _ = shadow_engine(blocks=40 * stages, size=4, rows=2, depth=stages - 1, stages=stages, seqs=2 * stages)
    clock = Stages(stages)
    submit, take = engine._submit, engine._take

    def submitted(step: Step) -> None:
        clock.submit()
        submit(step)

    def taken(output: Any) -> None:
        clock.await_oldest()
        take(output)

    engine._submit, engine._take = submitted, taken  # type: ignore[method-assign]
    for i in range(2 * stages):
        short = uneven and i < 2
        params = SamplingParams(temperature=0, max_tokens=20 if short else 80, seed=1, ignore_eos=True)
        engine.add(Request(f"r{i}", [3, 4, 5 + i], params))
    if uneven:  # the rest is dealt again
        for i in range(2):
            params = SamplingParams(temperature=0, max_tokens=60, seed=1, ignore_eos=True)
            engine.add(Request(f"late{i}", [6, 7, 8 + i], params))
    while len(engine.life.requests) >= 2 * stages:
        engine.step()
    share = clock.busy / (stages * max(clock.free))
    print(f"{stages} stages, {'uneven' if uneven else 'even'}: busy {share:.1%} of the time")
    assert share >= 0.9, f"stages are busy {share:.0%} of the time"
    assert max(clock.free) < 1.15 * stages * 80


def test_rows_that_are_left_are_dealt_evenly() -> None:
    """After all rows of some micro-batches have ended, the others go on in all micro-batches."""
    engine, _ = shadow_engine(blocks=200, size=4, rows=2, depth=3, stages=4, seqs=8)
    for i in range(8):
        lasting = i in (0, 1, 2, 3)  # of the first two micro-batches
        params = SamplingParams(temperature=0, max_tokens=60 if lasting else 5, seed=1, ignore_eos=True)
        engine.add(Request(f"r{i}", [3, 4, 5 + i], params))
    for _ in range(40):
        engine.step()
    assert engine.scheduler.micro_batches.sizes == [1, 1, 1, 1]
    engine.scheduler.check()
