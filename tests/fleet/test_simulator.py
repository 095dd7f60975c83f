"""The simulator: what the router wins over simpler choices, on traces that it was not tuned on."""

from __future__ import annotations

import pytest

from benchmarks.fleet.machine import Machine
from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.simulate import Outcome, simulate
from benchmarks.harness.common import quantile
from benchmarks.traces.sessions import sessions

RATE = 8.0
"""Requests a second and replica: about 60 % of what a replica can do without a cache."""
UNSEEN = (101, 102, 103)
"""Seeds that nothing was tuned on; it was done with 1 to 3."""


def run(name: str, replicas: int, requests: int, seed: int) -> Outcome:
    machine = Machine()
    return simulate(sessions(seed, requests, RATE * replicas), POLICIES[name](replicas, machine, seed), machine)


def hold_the_bars(replicas: int, requests: int, seed: int) -> str:
    """Asserts what the router must hold; returns the figures."""
    least, plain, router = (run(n, replicas, requests, seed) for n in ("least loaded", "plain hash", "router"))
    assert router.ended == plain.ended == least.ended == requests
    assert router.hit_share >= 0.8 * plain.hit_share
    assert router.quantile(0.99) <= least.quantile(0.99)
    assert router.quantile(0.5) <= 0.6 * least.quantile(0.5)
    return (
        f"{replicas} replicas, seed {seed}: hits {router.hit_share:.3f} (hash {plain.hit_share:.3f}), "
        f"TTFT p50/p99 {1e3 * router.quantile(0.5):.1f}/{1e3 * router.quantile(0.99):.0f} ms "
        f"(least loaded {1e3 * least.quantile(0.5):.1f}/{1e3 * least.quantile(0.99):.0f}), "
        f"decision p50 {1e6 * quantile(router.decisions, 0.5):.0f} us"
    )


def test_the_router_beats_hashing_and_least_load_in_a_small_fleet():
    hold_the_bars(8, 2500, UNSEEN[0])


def test_a_trace_comes_in_the_order_of_arrival_and_is_the_same_again():
    first, second = (list(sessions(5, 500, 20.0)) for _ in range(2))
    told = [(t.arrival, t.session.number, t.past, t.prompt, t.output) for t in first]
    assert told == [(t.arrival, t.session.number, t.past, t.prompt, t.output) for t in second]
    assert [t.arrival for t in first] == sorted(t.arrival for t in first)
    for turn in (t for t in first if t.session.texts[1:]):
        assert turn.past < turn.prompt
    spread = first[-1].arrival - first[len(first) // 2].arrival
    assert 10.0 < 250 / spread < 40.0


@pytest.mark.long
@pytest.mark.parametrize("seed", UNSEEN)
@pytest.mark.parametrize(("replicas", "requests"), [(8, 16_000), (64, 60_000), (1000, 200_000)])
def test_the_router_holds_its_bars_at_every_size(replicas, requests, seed):
    print(hold_the_bars(replicas, requests, seed))


@pytest.mark.long
def test_a_decision_costs_the_same_at_a_thousand_replicas_as_at_eight():
    medians = {n: quantile(run("router", n, 3000 * max(n // 64, 1), 9).decisions, 0.5) for n in (8, 1000)}
    print({n: f"{1e6 * m:.0f} us" for n, m in medians.items()})
    assert medians[1000] <= 200e-6
    assert medians[1000] < 2 * medians[8]
