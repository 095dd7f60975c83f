"""Sets up host memory for a rank's KV cache (``--kv-offloading-size``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from trencadis.core.config import EngineConfig
from trencadis.core.device.backend import Backend, LayerKV
from trencadis.core.errors import StartupError
from trencadis.core.graphs.rank_agreement import RankAgreement
from trencadis.core.host_memory import free_host
from trencadis.core.launches.host_block_copies import (
    CopyingBackend,
    HostKV,
    PlannedCopies,
    PlanningBackend,
    block_parts,
)
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.memory import kv_cache_size
from trencadis.core.memory.cache_plan import CachePlan
from trencadis.core.models.interface import Persistent
from trencadis.core.shared_constants import RESERVED_BLOCKS


def planned_copies(config: EngineConfig, backend: Backend, kv: Sequence[LayerKV]) -> PlannedCopies | None:
    """Returns the launches that copy blocks of caches like ``kv``; None if they are not requested or not needed."""
    if not (config.kv_offloading_size and backend.policy.host_blocks):
        return None
    return cast(PlanningBackend, backend).block_copies(kv)


def with_host_blocks(
    config: EngineConfig,
    runner: ModelRunner,
    held: Persistent,
    plan: CachePlan,
    copies: PlannedCopies | None = None,
    graphs: bool = False,
) -> CachePlan:
    """Sets up the requested host memory of a rank; returns the plan with its blocks.

    Without separate launches (``copies``), the hidden rows serve as the transfer buffer, since they are unused between
    two steps.

    Raises:
        StartupError: the size does not fit, or the hidden rows are smaller than a block.
    """
    if not config.kv_offloading_size:
        return plan
    backend, blocks = runner.backend, plan.num_blocks + RESERVED_BLOCKS
    block, world = _block_bytes(held.kv, blocks), backend.comm.world
    whole = kv_cache_size.on_all_stages(runner.model.config, block)
    (count,) = RankAgreement(backend).over_stages(kv_cache_size.host_block_count(config, whole, world, free_host()))
    note = kv_cache_size.format_note(count, whole, plan.block_size, world)
    plan = replace(plan, host_blocks=count, notes=(*plan.notes, note))
    if copies is not None:
        copies.bind(held.kv, graphs)
        copies.hold(count)
        runner.host_kv = copies
        runner.graphs.accept_compilations()
        return plan
    parts = block_parts(held.kv, blocks)
    rows = held.hidden[1:].view(-1).view(torch.uint8)
    if len(rows) < block:
        tokens = -(-block // (held.hidden.shape[1] * held.hidden.element_size()))
        works = f"--max-num-batched-tokens {tokens} holds one"
        raise StartupError(f"{kv_cache_size.format_flag(config)}: a block goes through the rows of a step; {works}")
    runner.host_kv = HostKV(cast(CopyingBackend, backend), parts, count, rows[:block])
    return plan


def _block_bytes(kv: Sequence[LayerKV], blocks: int) -> int:
    """Returns the bytes of one block of the caches over all layers."""
    tensors = [t for x in kv for t in (x.k, x.v, x.k_scale, x.v_scale, x.kept) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors) // blocks
