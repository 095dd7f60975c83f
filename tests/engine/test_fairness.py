"""Shares by weight: in virtual time, and through the scheduler under load."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_schedules import play
from tests.oracles.shadow_model import expand_step
from trencadis.core.kv.block_pool import BlockPool
from trencadis.core.launches.rank_input_batch import RankInputBatch
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.encoder_cache import EncoderCache
from trencadis.core.scheduling.fair_order import FairOrder
from trencadis.core.scheduling.request_lifecycle import Lifecycle
from trencadis.core.scheduling.scheduler import Scheduler
from trencadis.core.scheduling.scheduler_limits import SchedulerLimits
from trencadis.core.scheduling.sequence import Sequence, SequenceStatus
from trencadis.core.step import Step
from trencadis.core.step_output import HeadOutput, StepOutput

EOS = 1


class Driven:
    """A scheduler whose rows draw tokens at once; counts the tokens that each tenant was served."""

    def __init__(self, rows: int = 4, policy: str = "fair", blocks: int = 4000, caching: bool = True) -> None:
        limits = SchedulerLimits(
            max_tokens=64, max_rows=rows, max_model_len=4096, vocab=100, eos=(EOS,), fair=policy == "fair",
            by_priority=policy == "priority", caching=caching,
        )  # fmt: skip
        self.now = 0.0
        self.scheduler = Scheduler(limits, BlockPool(blocks), EncoderCache(64), rows, clock=lambda: self.now)
        self.life = Lifecycle(self.scheduler)
        self.batch = RankInputBatch()
        self.served: dict[str, int] = {}
        self.began: dict[str, int] = {}
        """The step that brought the first token of a request."""
        self.steps = 0
        self.ended: list[str] = []
        self.preempted: list[int] = []
        """How often each of those that ended had to wait again."""
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
        step = expand_step(self.batch, step)
        self._count(step)
        keys = [draw.key for row in step.rows for draw in row.samples]
        head = HeadOutput(np.full(len(keys), 7, np.int32))
        self.life.update(StepOutput(step.number, {key: i for i, key in enumerate(keys)}, head))
        self.steps += 1
        for delta in self.life.collect():
            self.began.setdefault(delta.id, self.steps)
            if delta.finish:
                self.ended.append(delta.id)
                self.preempted.append(delta.stats.preemptions if delta.stats is not None else 0)
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


def beside(made: Driven, clients: int, pause: int, requested: int, prompt: int = 20, answer: int = 3) -> list[int]:
    """Steps until the first tokens of a tenant of three times the flood's weight, whose clients ask again after
    ``pause`` steps."""
    waits, number = list[int](), 0
    asks = dict[int, str]()
    began, free_at = dict[str, int](), dict.fromkeys(range(clients), made.steps)
    while len(waits) < requested:
        for client, at in list(free_at.items()):
            if made.steps >= at:
                del free_at[client]
                id = asks[client] = f"mine{number}"
                number += 1
                began[id] = made.steps
                made.add(id, "quiet", 3.0, prompt, answer)
        made.step()
        for client, id in list(asks.items()):
            if id in made.ended:
                waits.append(made.began[id] - began[id])
                del asks[client]
                free_at[client] = made.steps + pause
    return waits


def flooded(rows: int, **given: bool) -> Driven:
    """All rows but the one that is kept are a flood's, with answers of 300 tokens."""
    made = Driven(rows=rows, **given)  # type: ignore[arg-type]
    made.add("first", "quiet", 3.0, 20, 1)
    for i in range(60):
        made.add(f"flood{i}", "flood", 1.0, 5, 300)
    for _ in range(40):
        made.step()
    assert len(made.scheduler.running) == rows - 1
    return made


def test_a_tenant_that_asks_for_no_more_than_its_share_has_it_at_once() -> None:
    """Four clients ask at the same time, while a flood's answers go on for hundreds of steps."""
    made = flooded(8)
    assert max(beside(made, 4, 5, requested=20)) <= 5
    running = [seq.request.tenant for seq in made.scheduler.running]
    assert running.count("flood") >= 4, "no more than it needs is taken from the flood"
    while made.life.requests:
        made.step()
    assert len(made.ended) == len(set(made.ended)) and sum(id.startswith("flood") for id in made.ended) == 60
    assert max(made.preempted) == 1, "nobody makes way twice"
    made.scheduler.check()


def running(made: Driven, tenant: str) -> list[str]:
    return [seq.request.id for seq in made.scheduler.running if seq.request.tenant == tenant]


def test_rows_are_kept_for_a_moment_for_those_who_have_just_left_them() -> None:
    made = Driven(rows=8, caching=False)
    for i in range(4):
        made.add(f"mine{i}", "quiet", 1.0, 5, 900)
    made.step()
    for i in range(60):
        made.add(f"flood{i}", "flood", 1.0, 5, 900)
    for _ in range(10):
        made.step()
    assert len(running(made, "quiet")) == len(running(made, "flood")) == 4
    for id in running(made, "quiet")[:3]:
        made.life.abort(id)
    for _ in range(8):
        made.step()
    made.add("again", "quiet", 1.0, 5, 900)
    made.step()
    assert "again" in running(made, "quiet") and len(running(made, "flood")) == 4
    for _ in range(6):
        made.step()
    assert len(running(made, "flood")) == 5, "the last free row is kept for longer than a tenth of a second"
    assert not any(made.preempted)


def test_a_row_that_is_kept_from_the_first_does_not_keep_another_out() -> None:
    """The flood's next request comes before those of the tenant for which the row is kept."""
    made = flooded(8, caching=False)
    for i in range(8):
        made.add(f"mine{i}", "quiet", 1.0, 150, 3)
    assert [seq.request.tenant for seq in made.scheduler.waiting[:4]] == ["quiet", "quiet", "flood", "quiet"]
    for _ in range(70):
        made.step()
    assert sum(id.startswith("mine") for id in made.ended) == 8 and len(running(made, "flood")) == 7


def test_tenants_that_want_all_rows_take_none_from_each_other() -> None:
    made = Driven(rows=8)
    for i in range(60):
        for tenant, weight in (("one", 1.0), ("three", 3.0)):
            made.add(f"{tenant}{i}", tenant, weight, *lengths(i))
    for _ in range(600):
        made.step()
    assert len(made.ended) > 40 and not any(made.preempted)


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
                assert (
                    seq.virtual_start is not None and places.setdefault(seq.key, seq.virtual_start) == seq.virtual_start
                )
    for _ in range(5000):
        if not made.step() and not made.life.requests:
            break
    assert sorted(made.ended) == sorted(f"r{i}" for i in range(len(requests)))
    made.scheduler.check()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 20), st.integers(0, 8), st.booleans()),
        min_size=1, max_size=30,
    ),
    st.integers(4, 9), st.integers(8, 60),
)  # fmt: skip
def test_what_tenants_run_and_wait_for_is_counted(
    requests: list[tuple[int, int, int, int, bool]], rows: int, blocks: int
) -> None:
    """Through preemptions for blocks and for shares, and through aborts in every state."""
    made = Driven(rows=rows, blocks=blocks)
    fair = made.scheduler.fair
    assert fair is not None

    def check() -> None:
        waiting = [s for s in made.life.sequences.values() if s.status is SequenceStatus.WAITING or s.requeue]
        for tenant in {f"t{i}" for i in range(4)}:
            found = fair._shares._of.get(tenant)
            counted = (0, 0) if found is None else (found.running, found.waiting)
            mine = sum(seq.request.tenant == tenant for seq in waiting)
            assert counted == (len(running(made, tenant)), mine)
        assert fair._shares.used == len(made.scheduler.running)

    for i, (tenant, prompt, answer, pause, aborted) in enumerate(requests):
        made.add(f"r{i}", f"t{tenant}", 1.0 + tenant, prompt, answer)
        if aborted:
            made.life.abort(f"r{i // 2}")
        for _ in range(pause):
            made.step()
            check()
    while made.step():
        check()
    assert not made.life.requests


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_do_not_change_where_choices_make_way(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made_way: list[int] = []
    usual = FairOrder.choose_displaced

    def counted(self: FairOrder, running: list[Sequence]) -> list[Sequence]:
        found = usual(self, running)
        made_way.extend(seq.key for seq in found)
        return found

    def of_a_tenant(request: Request, rng: random.Random) -> Request:
        request.tenant, request.weight = ("flood", 1.0) if rng.random() < 0.7 else (f"t{rng.randrange(3)}", 4.0)
        return request

    monkeypatch.setattr(FairOrder, "choose_displaced", counted)
    for seed in range(4, 10):
        before = len(made_way)
        scheduler = play(seed, 30, depth, of_a_tenant, seqs=(4, 8), fair=True).engine.scheduler
        fair = scheduler.fair
        assert fair is not None and not any(one.running or one.waiting for one in fair._shares._of.values())
        some = made_way[before:]
        assert len(some) == len(set(some)), "nobody makes way twice"
        assert scheduler.totals.preemptions >= len(some), "who makes way is preempted"
    assert len(made_way) > 5


def test_a_choice_that_ends_before_it_was_queued_costs_its_tenant_nothing() -> None:
    """Choices after the first are queued once the prompt is computed."""
    made = Driven()
    params = SamplingParams(max_tokens=5, n=3, temperature=1.0, ignore_eos=True)
    made.life.add(Request("several", [5, 6, 7], params, tenant="one", weight=1.0))
    fair = made.scheduler.fair
    assert fair is not None
    before = fair._time.ends["one"]
    made.life.abort("several", 1)
    assert fair._time.ends["one"] == before and fair._shares._of["one"].waiting == 1
    while made.life.requests:
        made.step()
    assert fair._shares._of["one"].waiting == 0
