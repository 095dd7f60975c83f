"""Plans measured on the same steps: padded and real work, alike for all. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trencadis.core.buckets import Plan, Stage, padded_tokens
from trencadis.core.costs import Costs
from trencadis.core.rectangles import cut_rows, group_images
from trencadis.core.replay import StepNeeds


@dataclass
class Work:
    """Sums over a trace. ``cost``: linear operations + attended pairs, in linear operations of one token."""

    tokens: int = 0
    blocks: int = 0
    slots: int = 0
    cost: float = 0.0
    launches: int = 0
    unplanned: int = 0


def real_work(steps: Iterable[StepNeeds], costs: Costs) -> Work:
    """What the steps would cost without any padding."""
    work = Work()
    for step in steps:
        for n in step.rows:
            blocks = -(-n.context // costs.block_size) if n.tokens > 1 else n.context // costs.block_size + 1
            work.tokens += n.tokens
            work.blocks += blocks
            work.cost += n.tokens + costs.pair * n.tokens * (n.context + (n.tokens + 1) / 2)
        for slots in step.images:
            work.slots += slots
            work.cost += costs.slot * slots + costs.slot_pair * slots**2
    return work


def planned_work(steps: Sequence[StepNeeds], plan: Plan, costs: Costs) -> Work:
    """What the steps cost in the buckets of ``plan``, cut by the same rules whatever the plan."""
    work, known = Work(), frozenset(plan.buckets)
    for step in steps:
        buckets = [c.bucket for c in cut_rows(step.rows, plan)]
        buckets += [b for b, _ in group_images(step.images, plan)] if step.images else []
        for bucket in buckets:
            work.launches += 1
            work.unplanned += bucket not in known
            work.cost += costs(bucket)
            if bucket.stage is Stage.VISION:
                work.slots += bucket.dims[0]
                continue
            work.tokens += padded_tokens(bucket)
            work.blocks += bucket.dims[1] if bucket.stage in (Stage.CONTEXT, Stage.DECODE) else 0
    return work
