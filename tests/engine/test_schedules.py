"""Random schedules over the shadow model: whatever is preempted, shared, chunked or aborted, answers do not change."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.shadow_model import ShadowRank, oracle
from trencadis.core.engine import Engine
from trencadis.core.executor.uniproc import Uniproc
from trencadis.core.kv.arena import Arena
from trencadis.core.kv.pool import BlockPool
from trencadis.core.layout import PATCH_VALUES
from trencadis.core.process.wire import EngineInfo
from trencadis.core.request import Delta, MediaSpan, Request, SamplingParams
from trencadis.core.scheduling.scheduler import Scheduler, SchedulerLimits

VOCAB = 60
EOS = (0,)
INFO = EngineInfo("shadow", "none", 0, 0, 0, VOCAB, 0)


class Clock:
    """Virtual seconds: one per call of ``tick``."""

    now = 1.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 1.0


def make(
    *, blocks: int, size: int, rows: int, depth: int, seqs: int = 8, tokens: int = 64, length: int = 96, **more: object
) -> tuple[Engine, ShadowRank]:
    limits = SchedulerLimits(
        max_tokens=tokens, max_rows=seqs, max_model_len=length, block_size=size, vocab=VOCAB, eos=EOS,
        encoder_slots=256, **more,
    )  # fmt: skip
    slots = seqs + 8
    rank = ShadowRank(blocks, size, rows, slots, VOCAB)
    scheduler = Scheduler(limits, BlockPool(blocks), Arena(rows), slots, Clock())
    return Engine(scheduler, Uniproc(rank, depth), INFO), rank


class Driver:
    """Feeds requests, pixels and aborts into an engine and checks what comes out."""

    def __init__(self, engine: Engine, rng: random.Random, length: int, media_delay: float = 0.3) -> None:
        self.engine, self.rng, self.length = engine, rng, length
        self.delay = media_delay
        self.requests: dict[str, Request] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.wanted: list[tuple[str, int]] = []

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        for i in range(request.params.n):
            self.got[request.id, i] = []
        self.engine.add(request)

    def turn(self) -> None:
        self.engine.scheduler.clock.tick()
        self.take(self.engine.step())
        self.wanted += self.engine.needs()
        for item in list(self.wanted):
            if self.rng.random() >= self.delay:
                self.wanted.remove(item)
                self.engine.media(*item, np.zeros((4, PATCH_VALUES), np.uint8))

    def take(self, deltas: list[Delta]) -> None:
        for d in deltas:
            key = (d.id, d.choice)
            assert key not in self.ended, "a choice spoke after its end"
            self.got[key] += d.tokens
            if d.finish:
                self.ended[key] = d.finish
                assert d.finish != "error", d.message

    def finish(self, turns: int = 200_000) -> None:
        while not self.engine.idle():
            self.turn()
            turns -= 1
            assert turns, "a request starved"
        self.take(self.engine.step())

    def verify(self) -> None:
        """Every choice ended once, with the oracle's tokens (a prefix of them where it was aborted)."""
        self.engine.scheduler.check()
        assert self.engine.scheduler.pool.used == 0
        assert set(self.ended) == set(self.got)
        for (request_id, choice), tokens in self.got.items():
            request = self.requests[request_id]
            seed = request.params.seed or 0
            expected = oracle(request, choice, seed, EOS, VOCAB, self.length)
            if self.ended[request_id, choice] == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected, f"{request_id}/{choice} {self.ended[request_id, choice]}"


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


def play(seed: int, count: int, depth: int, **shape: object) -> Driver:
    rng = random.Random(seed)
    length = rng.choice([48, 96])
    size = rng.choice([2, 4, 8, 16])
    least = -(-length // size)
    engine, _ = make(
        blocks=least + rng.choice([0, 1, least, 4 * least]),
        size=size,
        rows=2 + rng.choice([12, 12, 40]),
        depth=depth,
        seqs=rng.choice([1, 3, 8]),
        tokens=rng.choice([1, 7, 64]),
        length=length,
        by_priority=rng.random() < 0.5,
        caching=rng.random() < 0.8,
        chunk=rng.choice([0, 0, 1, 5]),
        **shape,
    )  # fmt: skip
    driver = Driver(engine, rng, length, media_delay=rng.choice([0.0, 0.5, 0.9]))
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(length)] for _ in range(3)]
    for number in range(count):
        driver.add(random_request(rng, number, length, images=rng.choice([0, 3]), prefixes=prefixes))
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
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_schedules(depth: int, seed: int) -> None:
    play(seed, 12, depth)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_seeded_run(seed: int, depth: int) -> None:
    play(seed, 150, depth)


@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_ten_thousand_requests(depth: int) -> None:
    total = preempted = 0
    for seed in range(25):
        driver = play(1000 + seed, 400, depth)
        total += len(driver.requests)
        preempted += driver.engine.scheduler.preemptions
    print(f"depth {depth}: {total} requests, {preempted} preemptions")
    assert total == 10_000 and preempted > 100


def crowded(seed: int) -> tuple[int, int]:
    """(encoded, different) images of 30 requests over an arena that holds about two images."""
    rng = random.Random(seed)
    engine, _ = make(blocks=64, size=4, rows=10, depth=1)
    driver, keys = Driver(engine, rng, 96), set[str]()
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
    return engine.scheduler.encoder.encoded, len(keys)


def test_images_encoded_ahead_are_seldom_encoded_again() -> None:
    """What is encoded ahead leaves rows to all that is wanted sooner, and what nobody wants is evicted first."""
    encoded, different = (sum(numbers) for numbers in zip(*map(crowded, range(8)), strict=True))
    print(f"{different} images, {encoded} encodings")
    assert encoded <= 1.06 * different


def test_media_of_waiting_choices_are_told_with_one_look_up() -> None:
    """Images behind a long prefix that is shared: the queue is asked in every step, so it may not walk all blocks."""
    engine, _ = make(blocks=64, size=4, rows=40, depth=0, length=200, tokens=128)
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
    order = list(scheduler._in_order())
    assert looks[0] == 5
    for choice, start in order:
        exact = len(scheduler._cached_blocks(choice)) * 4
        assert exact == 80 and all(
            (s.offset + s.length > start) == (s.offset + s.length > exact) for s in choice.request.spans
        )
