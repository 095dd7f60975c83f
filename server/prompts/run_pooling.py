"""Runs pooling requests on the engine.

The engine's request of a prompt that is pooled: it draws nothing.

Texts that are longer than the model's length: they run in parts, and the parts' vectors are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

import numpy as np

from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.pooling_config import ALL, Pooling
from trencadis.core.request import Request, SamplingParams
from trencadis.server.prompts.generation import Generation, merge_generations
from trencadis.server.prompts.multimodal_inputs import make_token_positions
from trencadis.server.prompts.prompt import Prompt
from trencadis.server.protocol.pooler_output import Float32, Float64, Raw, read_raw_values
from trencadis.server.protocol.pooling_params import PoolingParams


class Chunks(NamedTuple):
    """Parts of prompts, in order, and of which prompt each is."""

    prompts: list[Prompt]
    owners: list[int]


def divide_prompts(prompts: Sequence[Prompt], text: TextConfig, size: int) -> Chunks:
    """Divides prompts of more than ``size`` tokens, which have no media, into parts of at most ``size``."""
    made = Chunks([], [])
    for i, prompt in enumerate(prompts):
        if len(prompt.tokens) <= size:
            parts = [prompt]
        else:
            ids = [prompt.tokens[at : at + size] for at in range(0, len(prompt.tokens), size)]
            parts = [Prompt(part, None, None if text.causal else make_token_positions(text, part)) for part in ids]
        made.prompts.extend(parts)
        made.owners.extend([i] * len(parts))
    return made


def average_chunks(chunks: Chunks, values: Sequence[Raw]) -> list[Float64]:
    """One vector a prompt: the mean of its parts' ``values``, each [width], weighted by their tokens."""
    count = chunks.owners[-1] + 1 if chunks.owners else 0
    sums: list[Float64] = [np.zeros(0)] * count
    totals = [0] * count
    for owner, prompt, vector in zip(chunks.owners, chunks.prompts, values, strict=True):
        weighted = vector.astype(np.float64) * len(prompt.tokens)
        sums[owner] = weighted if not totals[owner] else sums[owner] + weighted
        totals[owner] += len(prompt.tokens)
    return [whole / total for whole, total in zip(sums, totals, strict=True)]


def make_pooling_request(
    id: str,
    prompt: Prompt,
    pooling: Pooling,
    params: PoolingParams,
    *,
    arrival: float,
    salt: str = "",
    priority: int = 0,
) -> Request:
    """Returns the engine's request of one prompt; its sampling parameters are defaults without effect."""
    made = prompt.make_request(id, SamplingParams(detokenize=False), arrival=arrival, salt=salt, priority=priority)
    made.pool = ALL if params.wants_token_values(pooling) else pooling.kind
    return made


async def run_pooling(generations: Sequence[Generation], pooling: Pooling, params: PoolingParams) -> list[Float32]:
    """Returns ``read_raw_values`` of each generation, in order; the first error ends all of them.

    Raises:
        TrencadisError: the engine failed.
    """
    async with aclosing(merge_generations(generations)) as pieces:
        async for _ in pieces:
            pass
    return [read_raw_values(g.streams[0].pooled, pooling, params, g.prompt.tokens) for g in generations]
