"""Measures the padded and real work of plans on the same steps. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trencadis.core.buckets import Bucket, Plan, Stage, padded_tokens
from trencadis.core.scheduling.image_packer import ImagePacker
from trencadis.core.shapes.launch_costs import Costs
from trencadis.core.shapes.rectangular_launches import split_rows
from trencadis.server.plan.traffic_replay import StepNeeds


@dataclass
class LaunchWork:
    """Sums over a trace. ``cost``: linear operations and attended pairs, in units of one token's linear operations."""

    tokens: int = 0
    blocks: int = 0
    slots: int = 0
    cost: float = 0.0
    launches: int = 0
    unplanned: int = 0


def sum_real_work(steps: Iterable[StepNeeds], costs: Costs) -> LaunchWork:
    """Returns the work of the steps without padding."""
    work = LaunchWork()
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


def sum_planned_work(steps: Sequence[StepNeeds], plan: Plan, costs: Costs) -> LaunchWork:
    """Returns the work of the steps in the buckets of ``plan``; the steps are cut by the same rules for every plan."""
    work, known = LaunchWork(), frozenset(plan.buckets)
    for bucket in (*list_text_launches(steps, plan), *list_vision_launches(steps, plan)):
        work.launches += 1
        work.unplanned += bucket not in known
        work.cost += costs(bucket)
        if bucket.stage is Stage.VISION:
            work.slots += bucket.dims[0]
            continue
        work.tokens += padded_tokens(bucket)
        work.blocks += bucket.dims[1] if bucket.stage in (Stage.CONTEXT, Stage.DECODE) else 0
    return work


def list_text_launches(steps: Iterable[StepNeeds], plan: Plan) -> Iterator[Bucket]:
    """Yields the launches of the steps' rows."""
    for step in steps:
        yield from (cut.bucket for cut in split_rows(step.rows, plan))


def list_vision_launches(steps: Iterable[StepNeeds], plan: Plan) -> Iterator[Bucket]:
    """Yields vision launches: one per step, with the waiting images that the scheduler would choose, until none is
    left.
    """
    packer = ImagePacker(plan, plan.policy.encoder_slots)
    coming = iter(steps)
    waiting: list[int] = []
    while (step := next(coming, None)) is not None or waiting:
        waiting += step.images if step is not None else ()
        chosen = set(packer.choose(waiting))
        if chosen:
            yield plan.fit(Stage.VISION, (sum(waiting[i] for i in chosen),))
            waiting = [slots for i, slots in enumerate(waiting) if i not in chosen]
