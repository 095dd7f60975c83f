"""Damaged files by the thousand through the decode workers: each is an image or a short 4xx, and no worker is lost."""

import asyncio
import time
from collections import Counter

import pytest

from tests.hostile.mutations import WHOLE, mutated
from trencadis.core.errors import TrencadisError
from trencadis.multimodal.images.image_decode_client import ImageDecoder
from trencadis.multimodal.images.image_header import inspect_header
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor

PROCESSOR = Qwen2VLImageProcessor(3136, 50176)
AT_A_TIME = 8
LONGEST = 30.0
"""Seconds that one file may take on a machine that does eight at a time, before it counts as a hang."""


async def outcome(decoder, number):
    """What became of file ``number``: 200, or the status of its error."""
    data = mutated(number)
    try:
        header = inspect_header(data, decoder.max_pixels)
        made = await asyncio.wait_for(decoder.prepare(data, header, PROCESSOR, ""), LONGEST)
        assert made.pixels.shape == (made.grid[1] * made.grid[2], 1176)
        return 200
    except TrencadisError as error:
        assert error.status in (400, 413, 415), f"file {number}: {error.status}"
        assert 0 < len(error.message) < 200 and " 0x" not in error.message, f"file {number}: {error.message}"
        return error.status


async def storm(decoder, numbers):
    """Counts of outcomes."""
    left, counts = iter(numbers), Counter()

    async def lane():
        for number in left:
            counts[await outcome(decoder, number)] += 1

    await asyncio.gather(*(lane() for _ in range(AT_A_TIME)))
    return counts


async def still_good(decoder):
    for data in WHOLE:
        await decoder.prepare(data, inspect_header(data), PROCESSOR, "")


@pytest.fixture
def decoder():
    made = ImageDecoder(1 << 24)
    yield made
    made.close()


def run(decoder, numbers):
    counts = asyncio.run(storm(decoder, numbers))
    asyncio.run(still_good(decoder))
    assert 1 <= len(decoder.pool.pids()) <= decoder.pool.size, "workers live"
    assert decoder.pool._granted == 0 and not decoder.pool._waiting
    return counts


def test_mutations(decoder):
    counts = run(decoder, range(2000))
    print(dict(counts), "worker deaths", decoder.pool.deaths)
    assert counts.total() == 2000 and counts[200] > 100 and counts[400] > 500
    assert decoder.pool.deaths <= 2


@pytest.mark.long
def test_100_000_mutations(decoder, request):
    """Goes on where an interrupted run ended; the count is kept in pytest's cache."""
    cache = request.config.cache
    state = cache.get("trencadis/mutations", {"done": 0, "counts": {}, "deaths": 0})
    start = time.monotonic()
    while state["done"] < 100_000:
        before = decoder.pool.deaths
        counts = run(decoder, range(state["done"], state["done"] + 2000))
        total = Counter(state["counts"]) + Counter({str(k): v for k, v in counts.items()})
        state = {
            "done": state["done"] + 2000,
            "counts": dict(total),
            "deaths": state["deaths"] + decoder.pool.deaths - before,
        }
        cache.set("trencadis/mutations", state)
        if state["done"] % 10_000 == 0:
            print(f"{state} {time.monotonic() - start:.0f} s, {decoder.pool.started} workers started", flush=True)
    assert sum(state["counts"].values()) == 100_000
    cache.set("trencadis/mutations", {"done": 0, "counts": {}, "deaths": 0})
