"""Host memory behind a rank's KV cache (``--kv-offloading-size``)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from trencadis.core.config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.graphs.agree import Agreement
from trencadis.core.launches.host_blocks import CopyingBackend, HostKV, block_parts
from trencadis.core.launches.runner import Runner
from trencadis.core.layout import RESERVED_BLOCKS
from trencadis.core.memory import host_tier
from trencadis.core.memory.free_host import free_host
from trencadis.core.memory.host_plan import CachePlan
from trencadis.core.models.interface import Persistent


def with_host_blocks(config: EngineConfig, runner: Runner, held: Persistent, plan: CachePlan) -> CachePlan:
    """Gives a rank the host memory that is asked for; returns the plan with its blocks.

    Copies go through the rows that a step's text leaves for its SAMPLE: between two steps nothing there is needed.

    Raises:
        StartupError: the size does not fit, or these rows are smaller than a block.
    """
    if not config.kv_offloading_size:
        return plan
    backend = runner.backend
    parts = block_parts(held.kv, plan.num_blocks + RESERVED_BLOCKS)
    block, world = sum(part.shape[1] for part in parts), backend.comm.world
    share = runner.model.config.share
    whole = block // len(share.layers) * runner.model.config.text.layers  # on all pipeline stages
    (count,) = Agreement(backend).over_stages(host_tier.blocks(config, whole, world, free_host()))
    rows = held.hidden[1:].view(-1).view(torch.uint8)
    if len(rows) < block:
        tokens = -(-block // (held.hidden.shape[1] * held.hidden.element_size()))
        works = f"--max-num-batched-tokens {tokens} holds one"
        raise StartupError(f"{host_tier.asked(config)}: a block goes through the rows of a step; {works}")
    runner.host_kv = HostKV(cast(CopyingBackend, backend), parts, count, rows[:block])
    note = host_tier.note(count, whole, plan.block_size, world)
    return replace(plan, host_blocks=count, notes=(*plan.notes, note))
