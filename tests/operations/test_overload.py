"""Five times what a server can take: who is let in is served as fast as ever, and the others hear so at once."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import httpx
import pytest

from tests.fakes.counting_engine import CountingEngine
from tests.operations.fake_server import FakeServer

ROWS, STEP, TOKENS, QUEUED = 8, 0.02, 10, 2
RATE = ROWS / (STEP * TOKENS)
"""Requests a second that the engine below can take."""


class PacedEngine(CountingEngine):
    """Steps of a fixed time with at most ``ROWS`` requests, in the order in which they came."""

    def runnable(self):
        return super().runnable()[:ROWS]

    def step(self):
        time.sleep(STEP)
        return super().step()


async def load(url: str, rate: float, seconds: float) -> tuple[list[float], list[float], int]:
    """Seconds until first tokens, seconds until refusals, and the number of other answers; ``rate`` a second at random
    times (Poisson), as users come."""
    first: list[float] = []
    refused: list[float] = []
    other = 0

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal other
        begun = time.monotonic()
        body = {"prompt": "Hi", "max_tokens": TOKENS, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429 and answer.headers["retry-after"]:
                refused.append(time.monotonic() - begun)
            elif answer.status_code != 200:
                other += 1
            else:
                unseen = True
                async for _ in answer.aiter_bytes():
                    if unseen:
                        first.append(time.monotonic() - begun)
                    unseen = False

    limits = httpx.Limits(max_connections=2000, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits) as http:
        await asyncio.gather(*(one(http) for _ in range(ROWS)))
        first.clear()
        at, tasks, rng = time.monotonic(), [], random.Random(1)
        for _ in range(int(rate * seconds)):
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(one(http)))
        await asyncio.gather(*tasks)
    return first, refused, other


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def overload(folder: Path, seconds: float) -> tuple[float, float, float, int, int]:
    """TTFT p99 at 80 % and at 500 %, p99 of the time to a refusal, and the numbers of served and refused requests."""
    engine = ("--engine", "tests.operations.test_overload:PacedEngine.create")
    words = ["--max-num-seqs", str(ROWS), "--max-num-queued-reqs", str(QUEUED), "--disable-uvicorn-access-log"]
    with FakeServer(*words, fakes=engine, cwd=folder) as server:
        deadline = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline, server.text
            try:
                url = server.url if server.lines and "listening" in server.text else ""
                if url and httpx.get(url + "/ready", timeout=20).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        usual, _, wrong = asyncio.run(load(server.url, 0.8 * RATE, seconds))
        busy, refused, more_wrong = asyncio.run(load(server.url, 5 * RATE, seconds))
        assert not wrong + more_wrong and refused and busy
    return p99(usual), p99(busy), p99(refused), len(busy), len(refused)


@pytest.mark.long
def test_five_times_the_load(tmp_path: Path) -> None:
    usual, busy, refusal, served, refused = overload(tmp_path, 20.0)
    print(
        f"TTFT p99 {1e3 * usual:.0f} ms at 80 %, {1e3 * busy:.0f} ms of {served} served at 500 %; "
        f"{refused} refused, p99 {1e3 * refusal:.0f} ms"
    )
    assert busy <= 2 * usual and refusal <= 0.05
