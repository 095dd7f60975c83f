"""Proves what launches cost at least with so many buckets, whatever sizes these have. Pure and deterministic.

The search (``bucket_search``) chooses among candidates on a grid and for needs that are rounded up. Here needs are
rounded down: a bucket that is rounded down in the same way holds the same needs and costs no more, so the least cost
over the rounded sizes is one that no plan undercuts. A Lagrangian relaxation bounds it from below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket
from trencadis.core.shapes.bucket_search import CostTable, search_choice
from trencadis.core.shapes.plan_from_recorded_needs import (
    KEPT_STAGES,
    compute_costs,
    list_covers,
    list_learned_keys,
    list_tight_sizes,
)
from trencadis.core.shapes.shape_need_histogram import Key

MOST_VALUES = 4_000_000
"""Most needs times sizes of one stage and variant; above it sizes are rounded down further."""

BOUND_ROUNDS = 300

Sizes = Mapping[tuple[int, ...], float]
"""Needs of one stage and variant, without rounding, and how often each occurs."""


def count_launches(launches: Iterable[Bucket]) -> dict[Key, dict[tuple[int, ...], float]]:
    """Returns how often each size is needed."""
    found: dict[Key, dict[tuple[int, ...], float]] = {}
    for need in launches:
        cells = found.setdefault((need.stage, need.variant), {})
        cells[need.dims] = cells.get(need.dims, 0.0) + 1.0
    return found


def bound_cost(plan: Plan, needs: Mapping[Key, Sizes], count: int, cost: Callable[[Bucket], float]) -> float:
    """Returns a cost that no ``count`` buckets undercut, each need being one launch.

    Launches that a plan cuts into several, at sizes that suit it, may cost less.

    Args:
        plan: gives the units of sizes, and the buckets that every plan keeps.
        needs: by stage and variant, the launches without padding.
        count: buckets of the stages of needs, those that every plan keeps included.

    Raises:
        ValueError: every plan keeps more buckets.
    """
    tables = [_table(plan, key, needs.get(key, {}), cost) for key in list_learned_keys(plan, set(KEPT_STAGES))]
    return search_choice(tables, count, rounds=BOUND_ROUNDS).bound


def _table(plan: Plan, key: Key, cells: Sizes, cost: Callable[[Bucket], float]) -> CostTable:
    """Returns the costs of the rounded needs in every size that could be best for them."""
    stage, variant = key
    covers = list_covers([b for b in plan.buckets if (b.stage, b.variant) == key])
    for points in (16, 8, 4, 2, 1):
        rounded = _round_needs(cells, plan.policy.alignment[stage], points)
        needs = np.array(sorted(rounded), dtype=np.int64).reshape(len(rounded), len(covers[0].dims))
        sizes = list_tight_sizes([sorted(set(column)) for column in needs.T.tolist()], needs) if len(needs) else []
        if len(sizes) * len(needs) <= MOST_VALUES:
            break
    candidates = sorted({*(Bucket(stage, dims, variant) for dims in sizes), *covers})
    weights = np.array([rounded[tuple(dims)] for dims in needs.tolist()])
    kept = set(covers)
    forced = np.array([b in kept for b in candidates])
    dims = np.array([b.dims for b in candidates], dtype=np.int64)
    costs = compute_costs(stage, needs, dims, [cost(b) for b in candidates])
    return CostTable(costs * weights[:, None], forced)


def _round_needs(cells: Sizes, units: Sequence[int], points: int) -> dict[tuple[int, ...], float]:
    """Returns the needs in whole units, rounded down to a grid that is finer on the first axis."""
    found: dict[tuple[int, ...], float] = {}
    for dims, weight in cells.items():
        whole = [-(-max(d, 1) // unit) * unit for d, unit in zip(dims, units, strict=True)]
        at = tuple(_round_down(d, points if axis else 4 * points) for axis, d in enumerate(whole))
        found[at] = found.get(at, 0.0) + weight
    return found


def _round_down(size: int, points: int) -> int:
    """Returns ``size`` rounded down to 1/``points`` of its octave."""
    step = max((1 << (size.bit_length() - 1)) // points, 1)
    return size // step * step
