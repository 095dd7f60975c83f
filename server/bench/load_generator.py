"""Sends the requests of a run and records the answers; measures the delays of its own event loop meanwhile.

Send times of requests: all at once, at a rate, or at a growing rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trencadis.server.bench.http_client import BenchClient, Exchange


def make_rates(count: int, rate: float, ramp: str = "", start: float = 0.0, end: float = 0.0) -> list[float]:
    """Returns the request rate at each request, per second: constant, or from ``start`` to ``end`` (``linear`` or
    ``exponential``).
    """
    if not ramp:
        return [rate] * count
    shares = [i / max(count - 1, 1) for i in range(count)]
    if ramp == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


def make_send_times(given: list[float], burstiness: float, seed: int, fixed: bool) -> list[float]:
    """Returns the seconds after the start at which requests are sent.

    The gaps are drawn from gamma distributions of shape ``burstiness`` around 1 / rate: 1 is a Poisson process, less
    has bursts, infinity none. With ``fixed`` the whole is scaled to take count / rate seconds, so that runs with
    different seeds offer the same load.
    """
    rng = np.random.default_rng(seed)
    gaps = []
    for rate in given:
        if math.isinf(rate) or rate <= 0:
            gaps.append(0.0)
        elif math.isinf(burstiness):
            gaps.append(1.0 / rate)
        else:
            gaps.append(float(rng.gamma(burstiness, 1.0 / (rate * burstiness))))
    found = np.cumsum(gaps)
    if fixed and len(found) and found[-1] > 0:
        found *= len(given) / given[0] / found[-1]
    return [float(one) for one in found]


TICK = 0.01


@dataclass(slots=True)
class RequestLoad:
    """Requests as bytes, the seconds at which they are sent, and the maximum that run at a time (0: any number)."""

    requests: Sequence[bytes]
    times: Sequence[float]
    most: int = 0


@dataclass
class ClientCost:
    """Figures of the client itself: CPU seconds, received pieces, and delays of its event loop.

    ``delays`` has a value every 10 ms: the seconds by which a timer came after its time. Data that arrived meanwhile
    was recorded late by as much.
    """

    cpu: float = 0.0
    pieces: int = 0
    delays: list[float] = field(default_factory=list)

    def summarise(self) -> dict[str, float]:
        """Returns the figures for the report."""
        late = sorted(self.delays) or [0.0]

        def at(share: float) -> float:
            return 1000 * late[min(len(late) - 1, int(share * len(late)))]

        return {
            "client_cpu_seconds": self.cpu,
            "client_cpu_us_per_piece": 1e6 * self.cpu / max(1, self.pieces),
            "client_loop_lag_p50_ms": at(0.5),
            "client_loop_lag_p99_ms": at(0.99),
            "client_loop_lag_max_ms": 1000 * late[-1],
        }


class LoadResult(NamedTuple):
    """A load that has run: the exchanges in the requests' order, the total seconds, and the client's own figures."""

    exchanges: list[Exchange]
    seconds: float
    cost: ClientCost


async def run_load(
    client: BenchClient, load: RequestLoad, ended: Callable[[Exchange], None] = lambda exchange: None
) -> LoadResult:
    """Runs a load.

    Args:
        ended: called with each exchange at its end.
    """
    slots: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if load.most:
        slots = asyncio.Semaphore(load.most)

    async def one(request: bytes, exchange: Exchange) -> None:
        async with slots:
            await client.run(request, exchange)
        ended(exchange)

    made = [Exchange() for _ in load.requests]
    own, tasks = ClientCost(), []
    gc.collect()
    gc.freeze()
    watch = asyncio.create_task(_measure_loop_delay(own))
    cpu, begun = sum(os.times()[:2]), time.perf_counter()
    try:
        for request, exchange, at in zip(load.requests, made, load.times, strict=True):
            pause = begun + at - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            exchange.started = time.perf_counter()
            tasks.append(asyncio.create_task(one(request, exchange)))
        await asyncio.gather(*tasks)
    finally:
        watch.cancel()
        for task in tasks:
            task.cancel()
        gc.unfreeze()
    seconds = time.perf_counter() - begun
    own.cpu, own.pieces = sum(os.times()[:2]) - cpu, sum(len(one.pieces) for one in made)
    return LoadResult(made, seconds, own)


async def _measure_loop_delay(own: ClientCost) -> None:
    while True:
        due = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        own.delays.append(max(0.0, time.perf_counter() - due))
