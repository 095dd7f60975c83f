"""Host memory behind the block pool: nothing is lost, no block comes back wrong, and prompts are not computed again."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_schedules import play
from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from trencadis.core.kv.block_pool import BlockPool, HostBlockPool
from trencadis.core.request import Request, SamplingParams


@given(
    st.integers(1, 8),
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("tdrpf"), st.integers(0, 9), st.integers(0, 5)), max_size=100),
)
@settings(deadline=None)
def test_what_comes_back_is_what_was_evicted(size: int, slots: int, actions: list[tuple[str, int, int]]) -> None:
    """Contents are followed through every copy, in the order in which they are listed."""
    pool, held = BlockPool(size, HostBlockPool(slots)), list[list[int]]()
    host, device, memory = pool.host, dict[int, bytes](), dict[int, bytes]()
    assert host is not None

    def run() -> None:
        for block, slot, out in host.take_moves():
            if out:
                memory[slot] = device[block]
            else:
                device[block] = memory[slot]

    for number, (action, a, b) in enumerate(actions):
        key = bytes([a])
        if action == "t" and (got := pool.take(b)):
            run()
            device.update(dict.fromkeys(got, b"nothing"))  # whoever takes a block writes to it, after the copies
            held.append(got)
        elif action == "d" and held:
            pool.drop(held.pop(a % len(held)))
        elif action == "p" and held:
            block = held[b % len(held)][0]
            if pool.find(key) is None and not pool.on_host(key) and device[block] == b"nothing":
                device[block] = key
                pool.publish(block, key)
        elif action == "r" and pool.on_host(key) and pool.find(key) is None and pool.free:
            held.append(pool.restore([key]))
            if number % 3 == 0:  # it may be evicted before its copy has run
                pool.drop(held.pop())
            else:
                run()
                assert device[held[-1][0]] == key
        elif action == "f" and a == 0:
            pool.forget()
        pool.check(held)
    run()
    for known in map(bytes, ([n] for n in range(10))):
        if (where := pool.find(known)) is not None:
            assert device[where] == known


def test_slots_that_are_read_are_not_overwritten_by_what_makes_room() -> None:
    """Two blocks, two slots: both come back, and both that give way find no slot."""
    pool = BlockPool(2, HostBlockPool(2))
    assert pool.host is not None
    for keys in ((b"a", b"b"), (b"c", b"d")):
        blocks = pool.take(2) or []
        for block, key in zip(blocks, keys, strict=True):
            pool.publish(block, key)
        pool.drop(blocks)
    assert pool.on_host(b"a") and pool.on_host(b"b") and len(pool.host.take_moves()) == 2
    back = pool.restore([b"a", b"b"])
    assert [move.out for move in pool.host.take_moves()] == [False, False]
    assert not pool.on_host(b"c") and not pool.on_host(b"d") and pool.find(b"a") == back[0]


def test_what_host_memory_has_is_not_copied_again() -> None:
    pool = BlockPool(1, HostBlockPool(4))
    assert pool.host is not None
    for _ in range(3):
        blocks = pool.restore([b"a"]) if pool.on_host(b"a") else pool.take(1) or []
        pool.publish(blocks[0], b"a")
        pool.drop(blocks)
        pool.drop(pool.take(1) or [])
    assert (pool.host.stored, pool.host.restored) == (1, 2)
    pool.forget()
    assert not pool.on_host(b"a") and pool.host.used == 0


@pytest.mark.parametrize("depth", [0, 1])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6, deadline=None)
def test_random_schedules_over_host_memory(depth: int, seed: int) -> None:
    """Preempted, shared, chunked, aborted, with images and forks: answers are those of the oracle."""
    driver = play(seed, 12, depth, host=random.Random(seed).choice([1, 2, 7, 60]))
    assert driver.engine.scheduler.pool.host is not None


def conversations(count: int, depth: int, seed: int = 0) -> tuple[ScheduleDriver, int, int]:
    """Requests over 24 texts of 20 blocks, 64 blocks on the device and 512 on the host.

    Returns:
        The driver, prompt tokens, and tokens that a prompt took that had been computed before.
    """
    rng, size = random.Random(seed), 4
    engine, rank = shadow_engine(
        blocks=64, size=size, rows=12, depth=depth, host=512, length=120, seqs=4, tokens=64,
    )  # fmt: skip
    driver = ScheduleDriver(engine, rng, 120)
    texts = [[rng.randrange(1, VOCAB) for _ in range(80)] for _ in range(24)]
    seen, prompts, again = set[tuple[int, ...]](), 0, 0
    for number in range(count):
        text = texts[rng.randrange(24)]
        tail = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 3))]
        before = rank.computed
        sampling = SamplingParams(temperature=0, max_tokens=2, seed=1, ignore_eos=True)
        driver.add(Request(f"r{number}", [*text, *tail], sampling))
        if number % 5 == 0:  # some come together
            driver.run_step()
            continue
        driver.finish()
        if number % 5 > 1:
            prompts += len(text)
            again += max(rank.computed - before - len(tail) - 1, 0) if tuple(text) in seen else 0
        seen.add(tuple(text))
        if number % 500 == 499:
            driver.verify()
            for known in (driver.requests, driver.got, driver.ended):
                known.clear()
    driver.finish()
    driver.verify()
    host = engine.scheduler.pool.host
    assert host is not None and (host.stored, host.restored) == (rank.stored, rank.restored)
    return driver, prompts, again


@pytest.mark.parametrize("depth", [0, 1])
def test_an_evicted_prompt_is_hardly_computed_again(depth: int) -> None:
    driver, prompts, again = conversations(200, depth)
    scheduler = driver.engine.scheduler
    assert scheduler.pool.evictions > 500 and scheduler.totals.host_hits > 2000
    assert again < 0.05 * prompts, (again, prompts)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_an_evicted_prompt_is_hardly_computed_again_long(depth: int) -> None:
    count = int(os.environ.get("TRENCADIS_TEST_REQUESTS", "100000")) // 2
    driver, prompts, again = conversations(count, depth, seed=1)
    pool = driver.engine.scheduler.pool
    assert pool.host is not None
    print(
        f"depth {depth}: {count} requests, {pool.evictions} blocks evicted, {pool.host.stored} copied out, "
        f"{pool.host.restored} back, {100 * again / prompts:.2f} % of known prompts computed again"
    )
    assert again < 0.05 * prompts
