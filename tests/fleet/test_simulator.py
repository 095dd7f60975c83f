"""The simulator: what the router wins over simpler choices, on traces that it was not tuned on."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.replica_costs import Machine
from benchmarks.fleet.simulate import Outcome, simulate, simulate_exactly
from benchmarks.harness.reporting import quantile
from benchmarks.traces.sessions import sessions
from trencadis.server.processes.replica_router import PrefixAffinityRouter

ROOT = Path(__file__).resolve().parents[2]
RATE = 8.0
"""Requests a second and replica: about 60 % of what a replica can do without a cache."""
UNSEEN = (101, 102, 103)
"""Seeds that nothing was tuned on; that was done with 1 to 20."""


def run(name: str, replicas: int, requests: int, seed: int) -> Outcome:
    machine = Machine()
    return simulate(sessions(seed, requests, RATE * replicas), POLICIES[name](replicas, machine, seed), machine)


def hold_the_bars(replicas: int, requests: int, seed: int) -> None:
    """Prints the figures, then asserts what the router must hold."""
    least, plain, router = (run(n, replicas, requests, seed) for n in ("least loaded", "plain hash", "router"))
    print(
        f"\n{replicas} replicas, seed {seed}: hits {router.hit_share:.3f} (hash {plain.hit_share:.3f}), "
        f"TTFT p50/p99 {1e3 * router.quantile(0.5):.1f}/{1e3 * router.quantile(0.99):.0f} ms "
        f"(least loaded {1e3 * least.quantile(0.5):.1f}/{1e3 * least.quantile(0.99):.0f}), "
        f"decision p50 {1e6 * quantile(router.decisions, 0.5):.0f} us",
        flush=True,
    )
    assert router.ended == plain.ended == least.ended == requests
    assert router.hit_share >= 0.8 * plain.hit_share
    assert router.quantile(0.99) <= least.quantile(0.99)
    assert router.quantile(0.5) <= 0.6 * least.quantile(0.5)


def test_the_router_beats_hashing_and_least_load_in_a_small_fleet():
    hold_the_bars(8, 2500, UNSEEN[0])


def test_a_trace_comes_in_the_order_of_arrival_and_is_the_same_again():
    first, second = (list(sessions(5, 500, 20.0)) for _ in range(2))
    reported = [(t.arrival, t.session.number, t.past, t.prompt, t.output) for t in first]
    assert reported == [(t.arrival, t.session.number, t.past, t.prompt, t.output) for t in second]
    assert [t.arrival for t in first] == sorted(t.arrival for t in first)
    for turn in (t for t in first if t.session.texts[1:]):
        assert turn.past < turn.prompt
    spread = first[-1].arrival - first[len(first) // 2].arrival
    assert 10.0 < 250 / spread < 40.0


@pytest.mark.long
@pytest.mark.parametrize("seed", UNSEEN)
@pytest.mark.parametrize(("replicas", "requests"), [(8, 16_000), (64, 60_000), (1000, 200_000)])
def test_the_router_holds_its_bars_at_every_size(replicas, requests, seed):
    hold_the_bars(replicas, requests, seed)


def lines_of_decisions(replicas: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lines of Python that each fifth decision of the second half of a trace runs, ascending."""
    found: list[int] = []
    calls, real = count(), PrefixAffinityRouter.choose

    def choose(self: PrefixAffinityRouter, *args: Any, **options: Any) -> Any:
        if (number := next(calls)) < 1500 or number % 5:
            return real(self, *args, **options)
        found.append(0)
        sys.settrace(trace)
        try:
            return real(self, *args, **options)
        finally:
            sys.settrace(None)

    def trace(frame: FrameType, event: str, given: object) -> Any:
        found[-1] += event == "line"
        return trace

    with monkeypatch.context() as patch:
        patch.setattr(PrefixAffinityRouter, "choose", choose)
        run("router", replicas, 3000, 9)
    return sorted(found)


def test_a_decision_does_as_much_at_a_thousand_replicas_as_at_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock: what memory adds to it, the long test measures."""
    few, many = (lines_of_decisions(n, monkeypatch) for n in (8, 1000))
    assert len(few) == len(many) == 300
    assert quantile(many, 0.5) < 1.25 * quantile(few, 0.5)
    assert many[-1] < 2.5 * quantile(few, 0.5)


@pytest.mark.long
def test_a_decision_costs_the_same_at_a_thousand_replicas_as_at_eight():
    medians = {n: quantile(run("router", n, 3000 * max(n // 64, 1), 9).decisions, 0.5) for n in (8, 1000)}
    print({n: f"{1e6 * m:.0f} us" for n, m in medians.items()})
    assert medians[1000] <= 200e-6
    assert medians[1000] < 2 * medians[8]


def compare(replicas: int, requests: int, seed: int) -> None:
    """Prints the figures of both, then asserts that the fast model and the product's scheduler agree within a tenth."""
    machine = Machine()
    fast, exact = (
        run(sessions(seed, requests, RATE * replicas), POLICIES["router"](replicas, machine, seed), machine)
        for run in (simulate, simulate_exactly)
    )
    pairs = {
        "hits": (fast.hit_share, exact.hit_share),
        "p50": (fast.quantile(0.5), exact.quantile(0.5)),
        "p99": (fast.quantile(0.99), exact.quantile(0.99)),
        "encoded": (fast.encoded, exact.encoded),
    }
    reported = ", ".join(f"{n} {a:.4g} {b:.4g}" for n, (a, b) in pairs.items())
    print(f"\n{replicas} replicas, fast and exact: {reported}", flush=True)
    assert fast.ended == exact.ended == requests
    assert len(exact.ttft) == requests and min(exact.ttft) >= machine.step
    for name, (a, b) in pairs.items():
        assert a == pytest.approx(b, rel=0.1), name


def test_the_fast_model_agrees_with_the_scheduler_in_a_small_fleet():
    compare(2, 260, 1)


def test_the_fast_model_agrees_with_the_scheduler_where_blocks_are_evicted():
    machine = Machine(blocks=220, arena=2400)
    fast, exact = (
        run(sessions(4, 240, 4.0), POLICIES["router"](1, machine, 4), machine) for run in (simulate, simulate_exactly)
    )
    unbounded = simulate(sessions(4, 240, 4.0), POLICIES["router"](1, Machine(), 4), Machine())
    assert exact.hit_share < 0.97 * unbounded.hit_share, "nothing was evicted that was wanted again"
    assert fast.hit_share == pytest.approx(exact.hit_share, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "requests"), [(4, 3000), (16, 6000)])
def test_the_fast_model_agrees_with_the_scheduler(replicas, requests):
    compare(replicas, requests, UNSEEN[replicas == 16])


@pytest.mark.long
def test_a_million_requests_at_a_thousand_replicas_take_ten_minutes_and_two_gigabytes():
    code = "from benchmarks.fleet.__main__ import main; main()"
    words = ["--replicas", "1000", "--requests", "1000000", "--policies", "router", "--seed", "7"]
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=3000, check=True
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stderr, f"{time.monotonic() - begun:.0f} s, {used.ru_utime:.0f} CPU s, {used.ru_maxrss >> 10} MiB")
    assert used.ru_maxrss << 10 < 2 << 30
    assert used.ru_utime + used.ru_stime < 600
