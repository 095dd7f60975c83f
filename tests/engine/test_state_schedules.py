"""Random schedules of a model with recurrent layers: every answer, and every prefix hit, equals the cold run."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_schedules import play
from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from tests.traffic.requests import searched
from trencadis.core.kv.block_pool import HostBlockPool
from trencadis.core.kv.recurrent_state_pool import StatePool
from trencadis.core.request import BeamRule, Request, SamplingParams
from trencadis.core.scheduling import recurrent_state_scheduler


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 tokens, so that short prompts have many."""
    for name, value in (("CHUNK", 4), ("INTERVAL", 16), ("TAIL", 4)):
        monkeypatch.setattr(recurrent_state_scheduler, name, value)


def play_states(seed: int, count: int, depth: int, **shape: Any) -> ScheduleDriver:
    rng = random.Random(seed)
    snapshots = rng.choice([0, 1, 3, 30])
    kept = HostBlockPool(rng.choice([1, 2, 8])) if shape.get("host") else None
    states = StatePool(rng.choice([2, 4, 9]) + snapshots, snapshots, kept)
    return play(seed, count, depth, states=states, **shape)


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("depth", [0, 1])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=13, deadline=None)
def test_random_schedules(depth: int, host: int, seed: int) -> None:
    play_states(seed, 12, depth, host=host)


@pytest.mark.long
@pytest.mark.parametrize(("depth", "stages", "host"), [(0, 1, 0), (1, 1, 0), (1, 1, 40), (1, 2, 40)])
def test_ten_thousand_schedules(depth: int, stages: int, host: int) -> None:
    hits = evictions = preemptions = resumed = 0
    for seed in range(2500):
        driver = play_states(seed, 12, depth, host=host, **({"stages": 2} if stages > 1 else {}))
        states = driver.engine.scheduler.states
        assert states is not None
        hits += states.pool.hits
        evictions += states.pool.evictions
        preemptions += driver.engine.scheduler.totals.preemptions
        resumed += driver.engine.stats().states_resumed
    counts = f"{hits} hits, {evictions} evictions, {preemptions} preemptions, {resumed} of them resumed"
    print(f"depth {depth}, stages {stages}, host {host}: {counts}")
    assert hits > 1000 and evictions > 100 and preemptions > 100 and (resumed > 1000) == bool(host)


@pytest.mark.parametrize("seed", range(4))
def test_beams_and_several_choices_begin_with_a_snapshot(seed: int) -> None:
    def change(request: Request, rng: random.Random) -> Request:
        if rng.random() < 0.4:
            return searched(request, rng)
        return dataclasses.replace(request, params=dataclasses.replace(request.params, n=rng.choice([1, 2, 4])))

    play_states(seed, 12, seed % 2, change=change)


def ask(driver: ScheduleDriver, number: int, prompt: list[int]) -> int:
    """Tokens of the prefix cache that a request began with."""
    before = driver.engine.scheduler.totals.prefix_hits
    driver.add(Request(f"r{number}", prompt, SamplingParams(temperature=0, max_tokens=4, seed=1)))
    driver.finish()
    return driver.engine.scheduler.totals.prefix_hits - before


def make_driver(states: StatePool, depth: int = 1, tokens: int = 64) -> ScheduleDriver:
    engine, _ = shadow_engine(blocks=200, size=2, rows=8, depth=depth, length=200, tokens=tokens, states=states)
    return ScheduleDriver(engine, random.Random(0), 200)


def test_a_third_prompt_hits_where_the_second_branched() -> None:
    rng = random.Random(5)
    shared = [rng.randrange(1, VOCAB) for _ in range(45)]
    others = [[rng.randrange(1, VOCAB) for _ in range(50)] for _ in range(3)]
    driver = make_driver(StatePool(20, 16))
    assert ask(driver, 0, shared + others[0]) == 0
    assert ask(driver, 1, shared + others[1]) == 32  # the last of every 16 tokens within what is shared
    assert ask(driver, 2, shared + others[2]) == 44  # where the second one branched, in whole chunks
    driver.verify()


def test_a_prompt_again_hits_at_its_end_and_a_chat_goes_on_from_there() -> None:
    driver = make_driver(StatePool(20, 16))
    prompt = [1 + i % 50 for i in range(70)]
    assert ask(driver, 0, prompt) == 0
    assert ask(driver, 1, [*prompt, *driver.got["r0", 0], 7, 8, 9]) == 68
    driver.verify()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_thins_its_own_snapshots_before_it_drops_those_of_others(depth: int) -> None:
    driver = make_driver(StatePool(20, 3), depth)
    others = [[1 + (i * step) % 50 for i in range(33)] for step in (3, 7)]
    for number, prompt in enumerate(others):
        assert ask(driver, number, prompt) == 0
    long = [1 + (i * i) % 47 for i in range(150)]
    assert ask(driver, 2, long) == 0, "nine snapshots, of which the last one stays"
    assert ask(driver, 3, [*long, 5]) == 148
    assert [ask(driver, 4 + i, [*prompt, 9]) for i, prompt in enumerate(others)] == [32, 32]
    driver.verify()


def test_snapshots_that_requests_began_with_are_not_thinned() -> None:
    driver = make_driver(StatePool(20, 2))
    shared = [1 + (i * i) % 47 for i in range(17)]
    assert ask(driver, 0, shared) == 0
    assert ask(driver, 1, [*shared, *range(1, 20)]) == 16, "the end of this prompt takes the second place"
    assert ask(driver, 2, [*shared, *range(20, 39)]) == 16
    assert ask(driver, 3, [*shared, *range(40, 58)]) == 16
    driver.verify()


@pytest.mark.parametrize("depth", [0, 1])
def test_beams_go_on_from_the_last_block_that_they_share(depth: int) -> None:
    """Each beam that another one leaves computes at most a block anew, and the end of the prompt once."""
    width, prompt, limit = 3, 9, 30
    engine, rank = shadow_engine(blocks=400, size=2, rows=8, depth=depth, length=200, states=StatePool(60, 50))
    driver = ScheduleDriver(engine, random.Random(0), 200)
    params = SamplingParams(n=width, temperature=0, max_tokens=limit, ignore_eos=True)
    driver.add(Request("a", [*range(1, prompt + 1)], params, beams=BeamRule(1.0, False)))
    driver.finish()
    driver.verify()
    assert rank.computed <= prompt + width * (prompt + 3 * limit)


def test_choices_begin_where_a_short_prompt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a prompt is kept for them even if a request of one answer would not keep it."""
    monkeypatch.setattr(recurrent_state_scheduler, "TAIL", 100)
    engine, rank = shadow_engine(blocks=200, size=2, rows=8, depth=1, length=200, states=StatePool(30, 20))
    driver = ScheduleDriver(engine, random.Random(0), 200)
    prompt = [1 + i % 50 for i in range(18 + 4)]
    driver.add(Request("a", prompt, SamplingParams(temperature=1, seed=1, n=4, max_tokens=3, ignore_eos=True)))
    driver.finish()
    driver.verify()
    assert rank.computed <= len(prompt) + 3 * 4 + 4 * 3


def test_nothing_is_published_before_its_launch_has_completed() -> None:
    engine, rank = shadow_engine(blocks=200, size=2, rows=8, depth=1, length=200, states=StatePool(20, 16))
    driver, scheduler = ScheduleDriver(engine, random.Random(0), 200), engine.scheduler
    assert scheduler.states is not None
    prompt = [1 + i % 50 for i in range(33)]
    driver.add(Request("a", prompt, SamplingParams(temperature=0, max_tokens=4, seed=1)))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None and len(scheduler.in_flight) == 2
    assert [len(row.tokens) for row in (*first.rows, *second.rows)] == [16, 16]
    pool = scheduler.states.pool
    assert scheduler.in_flight[0].snapshots and pool.snapshots < 1
    driver.add(Request("b", prompt, SamplingParams(temperature=0, max_tokens=4, seed=1)))
    third = scheduler.schedule()
    assert third is not None and [row.context for row in third.rows] == [32, 0], "it computes the prefix itself"
    engine.abort("a")
    for step in (first, second, third):
        engine.life.update(rank.execute(step).result())
    assert pool.snapshots == 2, "what an aborted request has computed stays right"
    driver.finish()
    assert driver.got["b", 0]


@pytest.mark.parametrize("depth", [0, 1])
def test_with_host_memory_a_preempted_sequence_computes_nothing_twice(depth: int) -> None:
    """Two answers of 20 blocks together in 14: one waits in host memory, with the block in which its state ends."""
    counts = {}
    for host in (0, 60):
        states = StatePool(4, 0, HostBlockPool(2) if host else None)
        engine, rank = shadow_engine(blocks=14, size=4, rows=8, depth=depth, length=56, states=states, host=host)
        driver = ScheduleDriver(engine, random.Random(0), 56)
        for number in range(2):
            prompt = [1 + (i + 7 * number) % 50 for i in range(13)]
            driver.add(Request(f"r{number}", prompt, SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)))
        driver.finish()
        driver.verify()
        engine.scheduler.check()
        counts[host] = rank.computed
        stats = engine.stats()
        assert stats.preemptions > 0 and (stats.states_kept, stats.states_resumed) == ((1, 1) if host else (0, 0))
    assert counts[60] == 2 * (13 + 25) < counts[0]


def test_without_room_for_snapshots_prompts_are_computed_and_right() -> None:
    driver = make_driver(StatePool(3))
    prompt = [1 + i % 50 for i in range(70)]
    assert ask(driver, 0, prompt) == 0 and ask(driver, 1, prompt) == 0
    driver.verify()


def test_a_budget_below_a_chunk_ends_chunks_anywhere() -> None:
    driver = make_driver(StatePool(9, 4), tokens=3)
    prompt = [1 + i % 50 for i in range(30)]
    ask(driver, 0, prompt)
    ask(driver, 1, prompt)
    driver.verify()
