"""Shares by weight: in virtual time, and through the scheduler under load."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.core.kv.arena import Arena
from trencadis.core.kv.pool import BlockPool
from trencadis.core.launches.batch import RankBatch
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.lifecycle import Lifecycle
from trencadis.core.scheduling.limits import SchedulerLimits
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.step import HeadOutput, Step, StepOutput

EOS = 1


class Driven:
    """A scheduler whose rows draw tokens at once; counts the tokens that each tenant was served."""

    def __init__(self, rows: int = 4, policy: str = "fair", blocks: int = 4000) -> None:
        limits = SchedulerLimits(
            max_tokens=64, max_rows=rows, max_model_len=4096, vocab=100, eos=(EOS,), fair=policy == "fair",
            by_priority=policy == "priority",
        )  # fmt: skip
        self.now = 0.0
        self.scheduler = Scheduler(limits, BlockPool(blocks), Arena(64), rows, clock=lambda: self.now)
        self.life = Lifecycle(self.scheduler)
        self.batch = RankBatch()
        self.served: dict[str, int] = {}
        self.ended: list[str] = []
        self.owners: dict[str, str] = {}

    def add(self, id: str, tenant: str, weight: float, prompt: int, answer: int) -> None:
        tokens = [2 + (hash((id, i)) % 90) for i in range(prompt)]
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        self.owners[id] = tenant
        self.life.add(Request(id, tokens, params, tenant=tenant, weight=weight, arrival=self.now))

    def step(self) -> bool:
        """One step; False if there is nothing to run."""
        self.now += 0.01
        step = self.scheduler.schedule()
        if step is None:
            return False
        step = self.batch.follow(step)
        self._count(step)
        keys = [draw.key for row in step.rows for draw in row.samples]
        head = HeadOutput(np.full(len(keys), 7, np.int32))
        self.life.update(StepOutput(step.number, {key: i for i, key in enumerate(keys)}, head))
        self.ended += [d.id for d in self.life.collect() if d.finish]
        return True

    def _count(self, step: Step) -> None:
        for row in step.rows:
            tenant = self.life.sequences[row.key].request.tenant
            self.served[tenant] = self.served.get(tenant, 0) + len(row.tokens)


def lengths(seed: int) -> tuple[int, int]:
    rng = random.Random(seed)
    return rng.choice((5, 40, 200)), rng.choice((4, 30, 120))


def test_two_tenants_under_load_share_by_weight() -> None:
    made = Driven()
    for i in range(120):
        for tenant, weight in (("one", 1.0), ("three", 3.0)):
            made.add(f"{tenant}{i}", tenant, weight, *lengths(i))
    for _ in range(1000):
        made.step()
    assert made.served["three"] / made.served["one"] == pytest.approx(3.0, rel=0.1)
    assert made.life.requests, "both were busy all the time"


def test_without_the_policy_they_share_by_arrival() -> None:
    made = Driven(policy="fcfs")
    for i in range(120):
        for tenant, weight in (("one", 1.0), ("three", 3.0)):
            made.add(f"{tenant}{i}", tenant, weight, *lengths(i))
    for _ in range(1000):
        made.step()
    assert made.served["three"] / made.served["one"] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_flood_does_not_hold_another_tenant_up(policy: str) -> None:
    made = Driven(policy=policy)
    for i in range(300):
        made.add(f"flood{i}", "flood", 1.0, *lengths(i))
    for _ in range(200):
        made.step()
    made.add("mine", "quiet", 1.0, 20, 10)
    steps = 0
    while "mine" not in made.ended:
        made.step()
        steps += 1
    # A row must come free and the answer be written; by arrival it waits for all of the flood.
    assert (steps < 200) == (policy == "fair"), steps


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_flood_leaves_a_row_for_another_tenant_that_comes_again(policy: str) -> None:
    """A long answer does not have to end before another tenant's request has its first token."""
    made = Driven(rows=16, policy=policy)
    made.add("first", "quiet", 1.0, 20, 1)
    for i in range(300):
        made.add(f"flood{i}", "flood", 1.0, *lengths(i))
    waits = []
    for i in range(40):
        for _ in range(7):
            made.step()
        made.add(f"mine{i}", "quiet", 1.0, 20, 1)
        steps = 0
        while f"mine{i}" not in made.ended and steps < 30:
            made.step()
            steps += 1
        waits.append(steps)
    # A prompt of 200 tokens that runs already goes first, in chunks of what 15 rows leave of 64 tokens.
    assert (max(waits) <= 5) == (policy == "fair"), waits


def test_alone_a_tenant_has_all_rows() -> None:
    made = Driven(rows=16)
    for i in range(40):
        made.add(f"r{i}", "one", 1.0, 3, 50)
    for _ in range(6):
        made.step()
    assert len(made.scheduler.running) == 16


def test_long_answers_are_charged_when_they_end() -> None:
    made = Driven(rows=2)
    for i in range(60):
        made.add(f"short{i}", "short", 1.0, 10, 10)
        made.add(f"long{i}", "long", 1.0, 10, 100)
    for _ in range(500):
        made.step()
    # All are queued at once, with one guess for both. What the first answers cost counts only for later requests.
    for i in range(60, 120):
        made.add(f"short{i}", "short", 1.0, 10, 10)
        made.add(f"long{i}", "long", 1.0, 10, 100)
    while made.step():
        pass
    assert len(made.ended) == 240


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([0.1, 1.0, 3.0, 50.0]), st.integers(1, 60), st.integers(1, 20),
                  st.integers(0, 12)),
        min_size=1, max_size=40,
    ),
    st.integers(1, 4), st.integers(8, 40),
)  # fmt: skip
def test_no_choice_starves_and_places_never_change(
    requests: list[tuple[int, float, int, int, int]], rows: int, blocks: int
) -> None:
    made = Driven(rows=rows, blocks=blocks)
    weights: dict[int, float] = {}
    places: dict[int, float] = {}
    for i, (tenant, weight, prompt, answer, pause) in enumerate(requests):
        made.add(f"r{i}", f"t{tenant}", weights.setdefault(tenant, weight), prompt, answer)
        for _ in range(pause):
            made.step()
            for seq in (*made.scheduler.running, *made.scheduler.waiting):
                assert seq.place is not None and places.setdefault(seq.key, seq.place) == seq.place
    for _ in range(5000):
        if not made.step() and not made.life.requests:
            break
    assert sorted(made.ended) == sorted(f"r{i}" for i in range(len(requests)))
    made.scheduler.check()
