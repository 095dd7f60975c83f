"""Random schedules over the shadow model: whatever is preempted, shared, chunked or aborted, answers do not change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.shadow_engine import VOCAB, ScheduleDriver, shadow_engine
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.step_builder_and_adapter_slots import cached_blocks


def random_request(rng: random.Random, number: int, length: int, images: int, prefixes: list[list[int]]) -> Request:
    prompt = list(rng.choice(prefixes)[: rng.randint(0, length // 2)])
    prompt += [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, length // 4))]
    spans: list[MediaSpan] = []
    for _ in range(rng.randint(0, images)):
        size = rng.choice([1, 2, 4, 6])
        at = (spans[-1].offset + spans[-1].length if spans else 0) + rng.randint(0, 2)
        if at + size >= len(prompt):
            break
        prompt[at : at + size] = [0] * size
        spans.append(MediaSpan(at, size, f"{rng.randrange(6):02x}{size:02x}", (1, 2, 2 * size), 64))
    positions, delta = None, 0
    if spans:
        delta = -rng.randint(0, 3)
        base = np.arange(len(prompt), dtype=np.int32)
        positions = np.stack([base, base // 2, base % 5]).astype("<i4").tobytes()
    greedy = rng.random() < 0.5
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 4]),
        temperature=0.0 if greedy else 1.0,
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        max_tokens=rng.choice([1, 3, 20, None]),
        min_tokens=0 if rng.random() < 0.8 else 1,
        seed=rng.randrange(1, 1000),
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.3 else [],
        logit_bias={rng.randrange(VOCAB): 2.0} if rng.random() < 0.2 else None,
    )
    salt = rng.choice(["", "", "s"])
    return Request(f"r{number}", prompt, params, spans, positions, delta, salt=salt, priority=rng.randint(0, 2))


def play(
    seed: int,
    count: int,
    depth: int,
    change: Callable[[Request, random.Random], Request] = lambda request, rng: request,
    seqs: tuple[int, ...] = (1, 3, 8),
    **shape: Any,
) -> ScheduleDriver:
    """Random requests, each as ``change`` makes it, in a random engine of ``seqs`` rows, held to the oracle."""
    rng = random.Random(seed)
    length = rng.choice([48, 96])
    size = rng.choice([2, 4, 8, 16])
    least = -(-length // size)
    engine, _ = shadow_engine(
        blocks=least + rng.choice([0, 1, least, 4 * least]),
        size=size,
        rows=2 + rng.choice([12, 12, 40]),
        depth=depth,
        seqs=rng.choice(seqs),
        tokens=rng.choice([1, 7, 64]),
        length=length,
        by_priority=rng.random() < 0.5,
        caching=rng.random() < 0.8,
        chunk=rng.choice([0, 0, 1, 5]),
        **shape,
    )  # fmt: skip
    driver = ScheduleDriver(engine, rng, length, media_delay=rng.choice([0.0, 0.5, 0.9]))
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(length)] for _ in range(3)]
    for number in range(count):
        request = random_request(rng, number, length, images=rng.choice([0, 3]), prefixes=prefixes)
        driver.add(change(request, rng))
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            driver.run_step()
        if rng.random() < 0.1:
            driver.engine.abort(f"r{rng.randrange(number + 1)}", rng.choice([-1, -1, 0, 1]))
        if rng.random() < 0.1:
            driver.engine.scheduler.check()
    driver.finish()
    driver.verify()
    return driver


@pytest.mark.parametrize("depth", [0, 1])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_random_schedules(depth: int, seed: int) -> None:
    play(seed, 12, depth)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=600, deadline=None)
def test_many_random_schedules(depth: int, seed: int) -> None:
    play(seed, 12, depth)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("count", [60, pytest.param(150, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", range(4))
def test_seeded_run(seed: int, count: int, depth: int) -> None:
    play(seed, count, depth)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_ten_thousand_requests(depth: int) -> None:
    total = preempted = 0
    for seed in range(25):
        driver = play(1000 + seed, 400, depth)
        total += len(driver.requests)
        preempted += driver.engine.scheduler.totals.preemptions
    print(f"depth {depth}: {total} requests, {preempted} preemptions")
    assert total == 10_000 and preempted > 100


def crowded(seed: int) -> tuple[int, int]:
    """(encoded, different) images of 30 requests over an arena that holds about two images."""
    rng = random.Random(seed)
    engine, _ = shadow_engine(blocks=64, size=4, rows=10, depth=1)
    driver, keys = ScheduleDriver(engine, rng, 96), set[str]()
    for number in range(30):
        tokens, spans = list[int](), list[MediaSpan]()
        for _ in range(rng.randint(1, 4)):
            tokens += [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 6))]
            length = rng.choice([1, 2, 4, 6])
            spans.append(
                MediaSpan(len(tokens), length, f"{rng.randrange(1000):04x}{length:02x}", (1, 2, 2 * length), 64)
            )
            tokens += [0] * length
            keys.add(spans[-1].digest)
        sampling = SamplingParams(temperature=0, max_tokens=rng.choice([1, 3, 20]), seed=1)
        driver.add(Request(f"r{number}", [*tokens, 3, 4], sampling, spans))
    driver.finish()
    return engine.scheduler.totals.images_encoded, len(keys)


def test_images_encoded_ahead_are_seldom_encoded_again() -> None:
    """What is encoded ahead leaves rows to all that is wanted sooner, and what nobody wants is evicted first."""
    encoded, different = (sum(numbers) for numbers in zip(*map(crowded, range(8)), strict=True))
    print(f"{different} images, {encoded} encodings")
    assert encoded <= 1.06 * different


def test_media_of_waiting_choices_are_told_with_one_look_up() -> None:
    """Images behind a long prefix that is shared: the queue is asked in every step, so it may not walk all blocks."""
    engine, _ = shadow_engine(blocks=64, size=4, rows=40, depth=0, length=200, tokens=128)
    prefix = [1 + i % 50 for i in range(80)]
    engine.add(Request("first", [*prefix, 3], SamplingParams(temperature=0, max_tokens=1)))
    while not engine.idle():
        engine.step()
    scheduler = engine.scheduler
    looks, find = [0], scheduler.pool.find

    def counted(key: bytes) -> int | None:
        looks[0] += 1
        return find(key)

    scheduler.pool.find = counted  # type: ignore[assignment, method-assign]
    for number in range(5):
        spans = [MediaSpan(80, 8, f"{number:02x}", (1, 2, 16), 64), MediaSpan(90, 4, "ff", (1, 2, 8), 64)]
        tokens = [*prefix, *[0] * 8, 1, 2, *[0] * 4, *[5] * 9]
        engine.add(Request(f"r{number}", tokens, SamplingParams(temperature=0, max_tokens=2), spans))
    order = list(scheduler._media_in_order())
    assert looks[0] == 5
    for choice, start in order:
        exact = len(cached_blocks(choice, scheduler.limits, scheduler.pool)) * 4
        assert exact == 80 and all(
            (s.offset + s.length > start) == (s.offset + s.length > exact) for s in choice.request.spans
        )
