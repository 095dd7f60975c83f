"""Start-up plan on paper with several pipeline stages; nothing starts. Torch-free.

Each stage divides its device's memory separately; together the stages agree on two numbers. The smallest supported
model length applies to all stages, and with it the shapes; the smallest number of KV blocks applies to all as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trencadis.core.engine.startup_plan import DryRun, StartupPlan
from trencadis.core.errors import StartupError
from trencadis.core.kv_cache_format import RESERVED_BLOCKS


def planned_stages(starts: Sequence[DryRun]) -> tuple[StartupPlan, ...]:
    """Returns the plan and the ledger of each stage's devices, with the same agreement as
    ``core.engine.device_startup``.

    Args:
        starts: the dry run of each stage, whose model is its share (``core.shapes.pipeline_partition.split_model``).

    Raises:
        StartupError: a stage does not fit; the message names it, and a setting with which it would.
    """
    found = [planned_stage(start) for start in starts]
    if len(found) == 1:
        return tuple(found)
    length = min(p.limits.max_model_len for p in found)
    for i, (start, planned) in enumerate(zip(starts, found, strict=True)):
        if planned.limits.max_model_len > length:
            found[i] = planned_stage(dataclasses.replace(start, at_most=length))
    if starts[0].model.text.recurrent is not None:
        held = min(p.states.sequences for p in found), min(p.states.snapshots for p in found)
        found = [planned_stage(dataclasses.replace(s, at_most=length, states_at_most=held)) for s in starts]
    blocks = min(p.ledger.memory_split.blocks for p in found)
    return tuple(_limit_blocks(p, blocks) for p in found)


def planned_stage(start: DryRun) -> StartupPlan:
    """Returns the plan of one stage.

    Raises:
        StartupError: it does not fit; the message names the stage, and a setting with which it would.
    """
    try:
        return start.plan_startup()
    except StartupError as error:
        share = start.model.share
        if share.stages == 1:
            raise
        raise StartupError(f"pipeline stage {share.stage} of {share.stages}: {error}") from None


def _limit_blocks(planned: StartupPlan, blocks: int) -> StartupPlan:
    """Returns the plan with a KV cache of ``blocks``; the rest of a larger one becomes margin."""
    memory_split = planned.ledger.memory_split
    if memory_split.blocks <= blocks:
        return planned
    kv = (blocks + RESERVED_BLOCKS) * planned.estimator.block_bytes(planned.limits.block_size)
    ledger = dataclasses.replace(planned.ledger, memory_split=dataclasses.replace(memory_split, kv=kv, blocks=blocks))
    return dataclasses.replace(planned, ledger=ledger)
