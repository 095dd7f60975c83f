"""Runs pooling requests on the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from trencadis.core.checkpoint.pooling import Pooling
from trencadis.server.pooling.params import PoolingParams
from trencadis.server.pooling.vectors import Float64, raw_values
from trencadis.server.prompts.generation import Generation, merged


async def pooled(generations: Sequence[Generation], pooling: Pooling, params: PoolingParams) -> list[Float64]:
    """``raw_values`` of each generation, in order; the first error ends all of them.

    Raises:
        TrencadisError: from the engine.
    """
    async with aclosing(merged(generations)) as pieces:
        async for _ in pieces:
            pass
    return [raw_values(g.streams[0].pooled, pooling, params, g.prompt.tokens) for g in generations]
