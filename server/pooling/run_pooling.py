"""Runs pooling requests on the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from trencadis.core.checkpoint.pooling_config import Pooling
from trencadis.server.pooling.pooler_output import Float32, read_raw_values
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.prompts.generation import Generation, merge_generations


async def run_pooling(generations: Sequence[Generation], pooling: Pooling, params: PoolingParams) -> list[Float32]:
    """Returns ``read_raw_values`` of each generation, in order; the first error ends all of them.

    Raises:
        TrencadisError: the engine failed.
    """
    async with aclosing(merge_generations(generations)) as pieces:
        async for _ in pieces:
            pass
    return [read_raw_values(g.streams[0].pooled, pooling, params, g.prompt.tokens) for g in generations]
