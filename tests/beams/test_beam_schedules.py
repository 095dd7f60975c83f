"""Beams among other requests over the shadow model: whatever is preempted, parked, shared or aborted, they find the
same sequences as a search alone."""

from __future__ import annotations

import random

import pytest

from tests.engine.test_schedules import random_request
from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from tests.traffic.requests import searched


def play(seed: int, count: int, depth: int, share: float = 0.4) -> ScheduleDriver:
    rng = random.Random(seed)
    length = rng.choice([48, 96])
    size = rng.choice([2, 4, 8, 16])
    least = -(-length // size)
    engine, _ = shadow_engine(
        blocks=least + rng.choice([0, 1, least, 4 * least]),
        size=size,
        rows=2 + rng.choice([12, 12, 40]),
        depth=depth,
        seqs=rng.choice([1, 3, 8, 16]),
        tokens=rng.choice([1, 7, 64]),
        length=length,
        by_priority=rng.random() < 0.5,
        caching=rng.random() < 0.8,
        chunk=rng.choice([0, 0, 1, 5]),
    )
    driver = ScheduleDriver(engine, rng, length, media_delay=rng.choice([0.0, 0.5, 0.9]))
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(length)] for _ in range(3)]
    for number in range(count):
        request = random_request(rng, number, length, images=rng.choice([0, 3]), prefixes=prefixes)
        driver.add(searched(request, rng) if rng.random() < share else request)
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            driver.turn()
        if rng.random() < 0.1:
            driver.engine.abort(f"r{rng.randrange(number + 1)}", rng.choice([-1, -1, 0, 1]))
        if rng.random() < 0.1:
            driver.engine.scheduler.check()
    driver.finish()
    driver.verify()
    return driver


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_beams_find_the_same_in_any_company(seed: int, depth: int) -> None:
    play(seed, 12, depth)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_three_thousand_requests_with_beams(depth: int) -> None:
    preempted = sum(play(1000 + seed, 30, depth).engine.scheduler.preemptions for seed in range(100))
    print(f"depth {depth}: 3000 requests, {preempted} preemptions")
    assert preempted > 100
