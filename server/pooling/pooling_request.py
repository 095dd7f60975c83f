"""The engine's request of a prompt that is pooled: it draws nothing."""

from __future__ import annotations

from trencadis.core.checkpoint.pooling_config import ALL, Pooling
from trencadis.core.request import Request, SamplingParams
from trencadis.server.pooling.pooling_params import PoolingParams
from trencadis.server.prompts.prompt import Prompt


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
