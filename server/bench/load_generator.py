"""Sends the requests of a run and records the answers; measures the delays of its own event loop meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trencadis.server.bench.http_client import BenchClient, Exchange

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


async def run_load(
    client: BenchClient, load: RequestLoad, ended: Callable[[Exchange], None] = lambda exchange: None
) -> tuple[list[Exchange], float, ClientCost]:
    """Runs a load; returns the exchanges in the requests' order, the total seconds, and the client's own figures.

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
    return made, seconds, own


async def _measure_loop_delay(own: ClientCost) -> None:
    while True:
        due = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        own.delays.append(max(0.0, time.perf_counter() - due))
