"""Beams among other requests over the shadow model: whatever is preempted, parked, shared or aborted, they find the
same sequences as a search alone."""

from __future__ import annotations

import random

import pytest

from tests.engine import test_schedules
from tests.oracles.shadow_engine import ScheduleDriver
from tests.traffic.requests import searched
from trencadis.core.request import Request


def play(seed: int, count: int, depth: int, share: float = 0.4) -> ScheduleDriver:
    def change(request: Request, rng: random.Random) -> Request:
        return searched(request, rng) if rng.random() < share else request

    return test_schedules.play(seed, count, depth, change, (1, 3, 8, 16))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_beams_find_the_same_in_any_company(seed: int, depth: int) -> None:
    play(seed, 12, depth)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_three_thousand_requests_with_beams(depth: int) -> None:
    preempted = sum(play(1000 + seed, 30, depth).engine.scheduler.totals.preemptions for seed in range(100))
    print(f"depth {depth}: 3000 requests, {preempted} preemptions")
    assert preempted > 100
