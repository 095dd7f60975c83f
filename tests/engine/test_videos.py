"""Videos over the shadow model: clips larger than the arena, equal frames, other rates, choices, preemption mid-clip.

The shadow's KV is made of the frames' content and of positions, so a wrong row, an evicted frame that is read, or a
block shared between two rates changes the answer.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.oracles.shadow_engine import ScheduleDriver, shadow_engine
from trencadis.core.media_spans import MediaSpan
from trencadis.core.request import Request, SamplingParams
from trencadis.multimodal.qwen2_vl.mrope import mrope_positions as positions

LENGTH = 96
RATES = (0.5, 1.0, 2.0)
ARENA = 12
"""Rows: two frames of the largest size, so most clips exceed it."""


def clip(rng: random.Random) -> tuple[int, list[str]]:
    """Tokens of a temporal patch, and digests; a clip may show a frame again, and share frames with another clip."""
    made = random.Random(rng.randrange(6))
    size = made.choice([1, 2, 4, 6])
    return size, [f"{made.randrange(9):02x}{size:02x}" for _ in range(made.randint(1, 40 // size))]


def request(rng: random.Random, number: int) -> Request:
    """Words, up to two clips at random rates, words."""
    tokens = [5] * rng.randint(0, 4)
    spans: list[MediaSpan] = []
    whole: list[MediaSpan] = []
    seconds: list[float | None] = []
    for _ in range(rng.choice([0, 1, 1, 2])):
        size, frames = clip(rng)
        if len(tokens) + size * len(frames) > LENGTH * 3 // 4:
            continue
        whole.append(MediaSpan(len(tokens), size * len(frames), "", (len(frames), 2, 2 * size), 0))
        seconds.append(rng.choice(RATES))
        for frame in frames:
            spans.append(MediaSpan(len(tokens), size, frame, (1, 2, 2 * size), 64))
            tokens += [0] * size
        tokens += [7] * rng.randint(0, 3)
    tokens += [rng.randrange(1, 4) for _ in range(rng.randint(1, 6))]
    made, delta = positions(len(tokens), whole, 2.0, 2, seconds)
    params = SamplingParams(
        n=rng.choice([1, 1, 2, 3]), temperature=rng.choice([0.0, 1.0]), max_tokens=rng.choice([1, 5, 12, 30]),
        seed=rng.randrange(1, 99), ignore_eos=True,
    )  # fmt: skip
    salt = rng.choice(["", "", "", "s"])
    return Request(f"r{number}", tokens, params, spans, made.astype("<i4").tobytes(), delta, salt)


def play(seed: int, count: int, depth: int, seen: Any) -> None:
    """Random traffic; ``seen`` counts what the test is about.

    Few sequences stand in the middle of a clip when blocks run short, because one that would stop at a missing frame is
    not admitted (``Encoder.holds_back``). Long answers of up to six sequences make blocks run short often enough.
    """
    rng = random.Random(seed)
    size = rng.choice([2, 4, 8])
    least = -(-LENGTH // size)
    engine, _ = shadow_engine(
        blocks=least + rng.choice([0, 2, least]), size=size, rows=2 + ARENA, depth=depth, seqs=rng.choice([2, 4, 6]),
        tokens=rng.choice([3, 17, 64]), length=LENGTH, chunk=rng.choice([0, 0, 5]),
    )  # fmt: skip
    scheduler = engine.scheduler
    preempt = scheduler._preempt

    def noting(victim: Any, builder: Any) -> None:
        spans = victim.request.spans
        seen.mid += any(s.offset < victim.computed < spans[-1].offset + spans[-1].length for s in spans[:1])
        preempt(victim, builder)

    scheduler._preempt = noting
    driver = ScheduleDriver(engine, rng, LENGTH, media_delay=rng.choice([0.0, 0.6]))
    for number in range(count):
        made = request(rng, number)
        seen.large += sum(s.length for s in made.spans) > ARENA
        driver.add(made)
        for _ in range(rng.choice([0, 1, 5])):
            driver.run_step()
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(number + 1)}")
    driver.finish()
    driver.verify()
    seen.evictions += scheduler.arena.evictions
    seen.shared += scheduler.totals.prefix_hits
    seen.rows += scheduler.totals.mm_hits


def tally() -> Any:
    return SimpleNamespace(mid=0, large=0, evictions=0, shared=0, rows=0)


@pytest.mark.parametrize("depth", [0, 1])
def test_random_clips(depth: int) -> None:
    seen = tally()
    for seed in range(10):
        play(seed, 25, depth, seen)
    assert min(vars(seen).values()) > 5, seen


def test_one_clip_four_times_the_arena_streams_through() -> None:
    """Its blocks are found again by the same clip, and at another rate up to where positions differ."""
    engine, _ = shadow_engine(blocks=40, size=4, rows=2 + ARENA, depth=0, tokens=64, length=LENGTH)
    spans = [MediaSpan(4 * i, 4, f"{i:02x}04", (1, 2, 8), 64) for i in range(12)]
    tokens = [0] * 48 + [1, 2]
    whole = [MediaSpan(0, 48, "", (12, 2, 8), 0)]
    for number, seconds in enumerate((1.0, 1.0, 4.0)):
        places, delta = positions(50, whole, 2.0, 2, [seconds])
        driver = ScheduleDriver(engine, random.Random(0), LENGTH, 0.0)
        hits = engine.scheduler.totals.prefix_hits
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        driver.add(Request(f"r{number}", tokens, sampling, spans, places.astype("<i4").tobytes(), delta))
        driver.finish()
        driver.verify()
        found = engine.scheduler.totals.prefix_hits - hits
        assert found == (0, 48, 4)[number], "at another rate only the first patch stands where it stood"
    assert engine.scheduler.arena.evictions >= 12 - ARENA // 4


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_many_random_clips(depth: int) -> None:
    seen = tally()
    for seed in range(100, 180):
        play(seed, 50, depth, seen)
    print(f"depth {depth}: {seen}")
    assert min(vars(seen).values()) > 100
