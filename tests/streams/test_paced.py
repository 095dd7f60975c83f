"""Calls that come in a flood: in their order, a few in each pass of the loop."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise

from trencadis.server.http.pending_request_heads_by_tenant import PacedCalls


def test_a_flood_leaves_every_pass_to_others_and_a_mistake_stops_no_call() -> None:
    done: list[int] = []
    passes: list[int] = []
    complaints: list[object] = []

    def work(i: int) -> None:
        done.append(i)
        if i == 5:
            raise ValueError("a mistake")

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context["exception"]))
        calls = PacedCalls(3)
        for round in range(2):
            for i in range(20):
                calls.put(loop, partial(work, 20 * round + i))
            while len(done) < 20 * (round + 1):
                passes.append(len(done))
                await asyncio.sleep(0)
        calls.put(loop, partial(work, 40))
        await asyncio.sleep(0.01)

    asyncio.run(body())
    assert done == [*range(41)] and len(complaints) == 1
    assert max(b - a for a, b in pairwise(passes)) <= 3
