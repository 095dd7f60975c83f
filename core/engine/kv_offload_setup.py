"""Sets up host memory for a rank's KV cache and recurrent states (``--kv-offloading-size``), and opens their pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from trencadis.core.device.backend import Backend, LayerKV
from trencadis.core.device.communicators_and_rank_agreement import RankAgreement
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.host_memory import free_host
from trencadis.core.kv.block_pool import BlockPool, HostBlockPool
from trencadis.core.kv.recurrent_state_pool import StatePool
from trencadis.core.kv_cache_format import RESERVED_BLOCKS
from trencadis.core.launches.host_block_copies import (
    CopyingBackend,
    HostKV,
    HostStates,
    PlannedCopies,
    PlanningBackend,
    block_parts,
    state_tensors,
    tensors_of,
)
from trencadis.core.launches.model_runner import ModelRunner
from trencadis.core.memory import host_memory_offload
from trencadis.core.memory.cache_plan import CachePlan
from trencadis.core.models.model_and_ops_api import Persistent


class OffloadLaunches(NamedTuple):
    """Launches that copy KV blocks, and recurrent states if the rank has layers with them."""

    blocks: PlannedCopies
    states: PlannedCopies | None

    def rehearse(self, tensors: Persistent) -> None:
        """Runs every launch on temporary caches, to measure the peak memory."""
        self.blocks.rehearse(tensors_of(tensors.kv))
        if self.states is not None:
            self.states.rehearse(state_tensors(tensors.recurrent))

    def bind(self, tensors: Persistent, graphs: bool) -> None:
        """Sets the caches and prepares the launches; ``graphs``: as graphs if the device's mode has them."""
        self.blocks.bind(tensors_of(tensors.kv), graphs)
        if self.states is not None:
            self.states.bind(state_tensors(tensors.recurrent), graphs)

    def hold(self, blocks: int, states: int) -> None:
        """Allocates host memory for so many blocks and states."""
        self.blocks.hold(blocks)
        if self.states is not None and states:
            self.states.hold(states)


def open_block_pool(plan: CachePlan) -> BlockPool:
    """Returns the pool of KV blocks, with those in host memory."""
    return BlockPool(plan.num_blocks, _open_host_pool(plan.host_blocks))


def open_state_pool(plan: CachePlan) -> StatePool | None:
    """Returns the pool of recurrent state; None: the model keeps none."""
    held = plan.states
    size = held.sequences + held.snapshots
    return StatePool(size, held.snapshots, _open_host_pool(plan.host_states)) if held.slots else None


def _open_host_pool(size: int) -> HostBlockPool | None:
    return HostBlockPool(size) if size else None


def planned_copies(config: EngineConfig, backend: Backend, held: Persistent) -> OffloadLaunches | None:
    """Returns the launches that copy blocks and states of caches like ``held``; None if they are not requested or not
    needed.
    """
    if not (config.kv_offloading_size and backend.policy.host_blocks):
        return None
    planning, states = cast(PlanningBackend, backend), state_tensors(held.recurrent)
    return OffloadLaunches(
        planning.block_copies(tensors_of(held.kv)), planning.state_copies(states) if states else None
    )


def with_host_blocks(
    config: EngineConfig,
    runner: ModelRunner,
    held: Persistent,
    plan: CachePlan,
    copies: OffloadLaunches | None = None,
    graphs: bool = False,
) -> CachePlan:
    """Sets up the requested host memory of a rank; returns the plan with its blocks and states.

    Without separate launches (``copies``), the hidden rows serve as the transfer buffer, since they are unused between
    two steps.

    Raises:
        StartupError: the size does not fit, or the hidden rows are smaller than a block.
    """
    if not config.kv_offloading_size:
        return plan
    backend, blocks = runner.backend, plan.num_blocks + RESERVED_BLOCKS
    block, world = _block_bytes(held.kv, blocks), backend.comm.world
    model = runner.model.config
    whole, states = (
        host_memory_offload.on_all_stages(model, block),
        host_memory_offload.count_host_states(config, model, backend.dtype.itemsize, world),
    )
    count, kept = RankAgreement(backend).over_stages(
        host_memory_offload.host_block_count(config, whole, world, free_host(), states), states.slots
    )
    note = host_memory_offload.format_note(count, whole, plan.block_size, world, states)
    plan = replace(plan, host_blocks=count, host_states=kept, notes=(*plan.notes, note))
    if copies is not None:
        copies.bind(held, graphs)
        copies.hold(count, kept)
        runner.host_kv, runner.host_states = copies.blocks, copies.states
        runner.graphs.accept_compilations()
        return plan
    parts = block_parts(held.kv, blocks)
    rows = held.hidden[1:].view(-1).view(torch.uint8)
    if len(rows) < block:
        tokens = -(-block // (held.hidden.shape[1] * held.hidden.element_size()))
        works = f"--max-num-batched-tokens {tokens} holds one"
        raise StartupError(
            f"{host_memory_offload.kv_offload_flag(config)}: a block goes through the rows of a step; {works}"
        )
    copying = cast(CopyingBackend, backend)
    runner.host_kv = HostKV(copying, parts, count, rows[:block])
    if kept:
        runner.host_states = HostStates(copying, state_tensors(held.recurrent), kept)
    return plan


def _block_bytes(kv: Sequence[LayerKV], blocks: int) -> int:
    """Returns the bytes of one block of the caches over all layers."""
    tensors = [t for x in kv for t in (x.k, x.v, x.k_scale, x.v_scale, x.kept) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors) // blocks
