"""Chooses few sizes of SAMPLE and RESET: each costs a compilation and a graph, and their padding costs little. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.shapes.shape_need_histogram import NeedHistogram

HEADS = (Stage.SAMPLE, Stage.RESET)

HEAD_TOLERANCE = 0.02
"""Share of decoding that padding of SAMPLE or RESET may take: on average over recorded needs, else in any launch."""

RESET_PADDING = 4
"""Most rows of a RESET launch over those of the size that it replaces: each row has the bytes of a vocabulary."""

MOST_SIZES = 12
"""Sizes of one variant up to which every choice is tried."""


def thin_heads(plan: Plan, needs: NeedHistogram | None = None) -> Plan:
    """Returns ``plan`` with fewer sizes of SAMPLE and RESET; the largest ones stay, so that every need is held.

    Args:
        needs: recorded needs, whose decoding rows are those that SAMPLE draws for; None: padding must cost little in
            every launch.
    """
    kept = [b for b in plan.buckets if b.stage not in HEADS]
    drawn = _count_drawn_rows(plan, needs) if needs is not None else {}
    for stage, variant in sorted({(b.stage, b.variant) for b in plan.buckets if b.stage in HEADS}):
        sizes = [b for b in plan.of(stage) if b.variant == variant]
        if stage is Stage.SAMPLE and drawn and len(sizes) <= MOST_SIZES:
            kept += _choose_by_needs(plan, sizes, drawn)
        else:
            kept += _choose_by_worst_case(plan, sizes)
    return dataclasses.replace(plan, buckets=tuple(sorted(kept)))


def _choose_by_worst_case(plan: Plan, sizes: Sequence[Bucket]) -> list[Bucket]:
    """Returns sizes whose padding adds at most ``HEAD_TOLERANCE`` of the cheapest decoding launch to any launch."""
    cost, left, kept = plan.policy.cost, list(sizes), list[Bucket]()
    most = HEAD_TOLERANCE * min((cost(b) for b in plan.of(Stage.DECODE)), default=0.0)
    while left:
        own, widest = left[0], RESET_PADDING * left[0].dims[0] if left[0].stage is Stage.RESET else math.inf
        near = [b for b in left if cost(b) - cost(own) <= most and b.dims[0] <= widest]
        kept.append(near[-1])
        left = left[len(near) :]
    return kept


def _count_drawn_rows(plan: Plan, needs: NeedHistogram) -> dict[int, tuple[float, float]]:
    """Returns by number of decoding rows the weight of such launches, and the sum of their costs."""
    found: dict[int, tuple[float, float]] = {}
    for (stage, variant), dims, weight in needs.list_cells():
        bucket = plan.find(stage, dims, variant) if stage is Stage.DECODE else None
        if bucket is not None:
            before = found.get(dims[0], (0.0, 0.0))
            found[dims[0]] = before[0] + weight, before[1] + weight * plan.policy.cost(bucket)
    return found


def _choose_by_needs(plan: Plan, sizes: Sequence[Bucket], drawn: dict[int, tuple[float, float]]) -> list[Bucket]:
    """Returns the fewest sizes whose padding takes at most ``HEAD_TOLERANCE`` of the decoding launches' cost in all."""
    most = HEAD_TOLERANCE * sum(cost for _, cost in drawn.values())
    exact = _sum_costs(plan, sizes, drawn)
    for count in range(len(sizes)):
        options = [(*some, sizes[-1]) for some in itertools.combinations(sizes[:-1], count)]
        costs = [_sum_costs(plan, option, drawn) for option in options]
        if min(costs) - exact <= most:
            return list(options[costs.index(min(costs))])
    return list(sizes)


def _sum_costs(plan: Plan, sizes: Sequence[Bucket], drawn: dict[int, tuple[float, float]]) -> float:
    """Returns the cost of the launches that draw, each in the smallest size that holds it, else in the largest."""
    priced = [(b.dims[0], plan.policy.cost(b)) for b in sizes]
    return sum(
        weight * next((cost for size, cost in priced if size >= rows), priced[-1][1])
        for rows, (weight, _) in drawn.items()
    )
