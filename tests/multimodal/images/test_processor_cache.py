"""The cache's bound, its order, its counters, and one preparation for equal requests."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest

from trencadis.core.errors import BadRequest
from trencadis.multimodal.images.processor_cache import ProcessorCache
from trencadis.multimodal.processor_interface import PreparedImage


def put(cache, key, image):
    """Keeps an image that nobody prepares."""
    with cache._lock:
        cache._store(key, image)


def get(cache, key):
    return asyncio.run(cache.find(key))


def fake(digest, patches=4):
    return PreparedImage(digest, np.zeros((patches, 1176), np.uint8), (1, 2, patches // 2), patches // 4, 64, (28, 28))


SIZE = fake("").nbytes


def test_least_recently_used_goes_first():
    cache = ProcessorCache(3 * SIZE)
    for key in "abc":
        put(cache, key, fake(key))
    assert get(cache, "a") is not None
    put(cache, "d", fake("d"))
    assert get(cache, "b") is None and get(cache, "a") and get(cache, "c") and get(cache, "d")
    assert (cache.queries, cache.hits, cache.bytes, len(cache)) == (5, 4, 3 * SIZE, 3)


def test_bytes_are_exact_and_bounded_on_random_use():
    rng = random.Random(3)
    cache = ProcessorCache(10 * SIZE)
    for _ in range(500):
        put(cache, rng.choice("abcdefghij"), fake("", 4 * rng.randint(1, 12)))
        assert cache.bytes == sum(p.nbytes for p in cache._images.values()) <= cache.max_bytes


def test_what_exceeds_the_bound_alone_is_not_kept_and_evicts_nothing():
    cache = ProcessorCache(2 * SIZE)
    put(cache, "a", fake("a"))
    put(cache, "big", fake("big", 64))
    assert get(cache, "big") is None and get(cache, "a") is not None


def test_equal_coroutines_share_one_preparation():
    cache, made = ProcessorCache(10 * SIZE), []

    async def work():
        made.append(1)
        await asyncio.sleep(0.01)
        return fake("a")

    async def main():
        return await asyncio.gather(*(cache.load("a", work) for _ in range(8)))

    got = asyncio.run(main())
    assert len(made) == 1 and all(p is got[0] for p in got)
    assert (cache.queries, cache.hits) == (8, 7)


def test_equal_threads_share_one_preparation():
    cache, made, gate = ProcessorCache(0), [], threading.Event()

    async def work():
        made.append(1)
        gate.wait(5)
        return fake("a")

    out = []
    threads = [threading.Thread(target=lambda: out.append(asyncio.run(cache.load("a", work)))) for _ in range(6)]
    for t in threads:
        t.start()
    end = time.monotonic() + 5
    while cache.queries < 6 and time.monotonic() < end:
        time.sleep(0.001)
    gate.set()
    for t in threads:
        t.join(5)
    assert len(made) == 1 and len(out) == 6 and len(cache) == 0


def test_an_error_reaches_every_waiter_as_its_own_and_is_not_kept():
    cache = ProcessorCache(10 * SIZE)

    async def fail():
        await asyncio.sleep(0.01)
        raise BadRequest("no")

    async def good():
        return fake("a")

    async def main():
        errors = await asyncio.gather(*(cache.load("a", fail) for _ in range(3)), return_exceptions=True)
        return errors, await cache.load("a", good)

    errors, again = asyncio.run(main())
    assert [type(e) for e in errors] == [BadRequest] * 3 and len({id(e) for e in errors}) == 3
    assert again.digest == "a"


@pytest.mark.parametrize("victim", [0, 1])
def test_cancelling_one_caller_does_not_fail_the_other(victim):
    cache = ProcessorCache(10 * SIZE)

    async def work():
        await asyncio.sleep(0.02)
        return fake("a")

    async def main():
        tasks = [asyncio.create_task(cache.load("a", work)) for _ in range(2)]
        await asyncio.sleep(0.005)
        tasks[victim].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(main())
    assert isinstance(got[victim], asyncio.CancelledError)
    assert isinstance(got[1 - victim], PreparedImage)
