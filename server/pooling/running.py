"""Runs pooling requests on the engine: requests that draw nothing, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from trencadis.core.checkpoint.pooling import Pooling
from trencadis.core.request import Request, SamplingParams
from trencadis.server.pooling.vectors import Float64, raw_values
from trencadis.server.prompts.generation import Generation, merged
from trencadis.server.prompts.service import Prompt


def pooling_request(
    id: str, prompt: Prompt, pooling: Pooling, *, arrival: float, salt: str = "", priority: int = 0
) -> Request:
    """The engine's request of one prompt; its sampling parameters say nothing."""
    made = prompt.request(id, SamplingParams(detokenize=False), arrival=arrival, salt=salt, priority=priority)
    made.pool = pooling.kind
    return made


async def pooled(generations: Sequence[Generation]) -> list[Float64]:
    """[width] of each generation, in order; the first error ends all of them.

    Raises:
        TrencadisError: from the engine.
    """
    async with aclosing(merged(generations)) as pieces:
        async for _ in pieces:
            pass
    return [raw_values(g.streams[0].pooled) for g in generations]
