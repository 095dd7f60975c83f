"""Plans buckets from recorded needs: those of the limits are replaced by the ones with which the needs cost least.

The buckets that make every possible need fit are kept, so that a learned plan holds all that the first one held, and no
bucket is larger than a planned one, so that no launch needs more memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.shapes.bucket_search import CostTable, PoolLimit, search_choice
from trencadis.core.shapes.shape_need_histogram import RECORDED_STAGES, Key, NeedHistogram, round_to_grid

KEPT_STAGES = tuple(stage for stage in Stage if stage not in RECORDED_STAGES)
"""Stages whose needs are not recorded: they keep their buckets, which do not count to the limit of graphs."""

WORK_WEIGHT = 1.5
"""Weight of the padded work beside the expected time in what the search minimises."""

MAX_CANDIDATES = 800
"""Most candidates of one stage and variant; above it the grid of sizes is made coarser."""

BORROWED = 0.05
"""Weight of the needs that a variant without needs of its own borrows from the plain launches of its stage."""

SPREAD = ((0, 0.7), (1, 0.12), (-1, 0.12), (2, 0.03), (-2, 0.03))
"""Steps of a sixteenth octave, and the share of a need that counts as that much larger or smaller on each axis of text.

A trace is a sample: other traffic of the kind needs sizes near those that were recorded.
"""

LEAST_SHARE = 1e-5
"""Share of a stage's needs below which a size that was only inferred is left out."""


class TooFewGraphs(ValueError):
    """The limit of graphs is below the buckets that make every need fit; ``least`` is their number."""

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} graphs are needed")
        self.least = least


@dataclass(frozen=True)
class LearnedPlan:
    """A plan from needs.

    Args:
        graphs: buckets of the learned stages, without those of ``KEPT_STAGES`` and of stages that were not learned.
        cost: expected cost of the recorded needs.
        bound: no choice of as many of the candidates costs less.
        static: expected cost of the same needs in the plan of the limits.
    """

    plan: Plan
    graphs: int
    cost: float
    bound: float
    static: float


@dataclass(frozen=True)
class GraphMemoryLimits:
    """Bytes of graphs.

    Args:
        bytes_of: bytes of the graph of a bucket.
        pools: stages that share a pool, and the bytes that it has for them.
    """

    bytes_of: Callable[[Bucket], float]
    pools: tuple[tuple[frozenset[Stage], float], ...]


def learn_plan(
    plan: Plan,
    needs: NeedHistogram,
    max_graphs: int,
    unchanged: Iterable[Stage] = (),
    work: Callable[[Bucket], float] | None = None,
    time: Callable[[Bucket], float] | None = None,
    charges: Mapping[Stage, float] | None = None,
    present: Collection[Bucket] = (),
    memory: GraphMemoryLimits | None = None,
    hedge: float = 0.0,
) -> LearnedPlan:
    """Returns the plan of at most ``max_graphs`` buckets with which ``needs`` cost least.

    The cost is the time of the launches, in units of that of all needs in ``plan``, plus ``WORK_WEIGHT`` times the
    padded work in such units, so that neither gets far worse where the other one hardly matters.

    Args:
        plan: the plan of the limits.
        unchanged: stages that keep their buckets, because the user has set their sizes.
        work: operations of a launch (``launch_costs.work_of``); None: only the time counts.
        time: the time of a launch, in any unit; None: the policy's cost.
        charges: by stage, the share of the device's time that one more bucket costs, e.g. for its compilation.
        present: buckets that cost no charge, because they have been made already.
        memory: bytes of graphs and of their pools; None: there is no limit.
        hedge: cost of needs that were not recorded, over that of those that were: each bucket of ``plan`` is needed
            for an equal share of it, so that other traffic than the recorded one does not cost far more.

    Raises:
        TooFewGraphs: ``max_graphs`` is below the buckets that every plan needs.
    """
    fixed = {*KEPT_STAGES, *unchanged}
    keys = list_learned_keys(plan, fixed)
    groups = [_Group(key, plan, _needs_of(key, needs)) for key in keys]

    def cost_now(cost: Callable[[Bucket], float]) -> float:
        return sum(group.static_cost(cost) for group in groups)

    parts = [(1.0, time or plan.policy.cost)] + ([(WORK_WEIGHT, work)] if work is not None else [])
    shares = [(weight / (cost_now(cost) or 1.0), cost) for weight, cost in parts]

    def price(bucket: Bucket) -> float:
        return sum(share * cost(bucket) for share, cost in shares)

    static = cost_now(price)
    if hedge:
        share = hedge * static / sum(len(g.planned) for g in groups)
        for group in groups:
            group.add_planned(share, price)
    tables = [g.table(price, (charges or {}).get(g.stage, 0.0), present) for g in groups]
    least = sum(int(t.forced.sum()) for t in tables)
    if max_graphs < least:
        raise TooFewGraphs(least)
    choice = search_choice(tables, max_graphs, [] if memory is None else _list_pools(groups, memory))
    chosen = [g.candidates[j] for g, found in zip(groups, choice.chosen, strict=True) for j in found]
    kept = [b for b in plan.buckets if b.stage in fixed]
    learned = dataclasses.replace(plan, buckets=tuple(sorted([*kept, *chosen])))
    return LearnedPlan(learned, len(chosen), choice.cost, choice.bound, static)


def _list_pools(groups: Sequence[_Group], memory: GraphMemoryLimits) -> list[PoolLimit]:
    """Returns the limits of the pools for the candidates of the groups."""
    return [
        PoolLimit(
            {
                g: np.array([memory.bytes_of(b) for b in group.candidates])
                for g, group in enumerate(groups)
                if group.stage in stages
            },
            limit,
        )
        for stages, limit in memory.pools
    ]


def expected_cost(plan: Plan, needs: NeedHistogram, time: Callable[[Bucket], float] | None = None) -> float:
    """Returns the time of the needs in the buckets of ``plan``, by default the policy's cost."""
    keys = list_learned_keys(plan, set(KEPT_STAGES))
    return _static_cost(plan, [key for key in keys if key in needs.cells], needs, time or plan.policy.cost)


def list_learned_keys(plan: Plan, fixed: set[Stage]) -> list[Key]:
    """Returns the stages and variants of a plan without those stages that keep their buckets."""
    return sorted({(b.stage, b.variant) for b in plan.buckets if b.stage not in fixed})


def _static_cost(plan: Plan, keys: Sequence[Key], needs: NeedHistogram, cost: Callable[[Bucket], float]) -> float:
    """Returns the cost of the needs in the buckets of ``plan``."""
    return sum(_Group(key, plan, _needs_of(key, needs)).static_cost(cost) for key in keys)


def _needs_of(key: Key, needs: NeedHistogram) -> Mapping[tuple[int, ...], float]:
    own = needs.cells.get(key)
    if own or not key[1]:
        return own or {}
    return {dims: BORROWED * weight for dims, weight in needs.cells.get((key[0], ""), {}).items()}


def list_covers(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Returns the buckets of one stage and variant that no other one holds; prompts can always run one by one."""
    if buckets and buckets[0].stage is Stage.FRESH:
        buckets = [b for b in buckets if b.dims[0] == 1] or buckets
    return [b for b in buckets if not any(o != b and _holds(o.dims, b.dims) for o in buckets)]


def _holds(bucket: Sequence[int], need: Sequence[int]) -> bool:
    return all(x >= y for x, y in zip(bucket, need, strict=True))


class _Group:
    """Needs and candidates of one stage and variant."""

    def __init__(self, key: Key, plan: Plan, cells: Mapping[tuple[int, ...], float]) -> None:
        self.stage, self.variant = key
        self.plan = plan
        planned = [b for b in plan.buckets if (b.stage, b.variant) == key]
        self.planned, self.covers = planned, list_covers(planned)
        self.largest = [b for b in planned if not any(o != b and _holds(o.dims, b.dims) for o in planned)]
        near = self._spread(self._align(cells))
        covered = [d for d in sorted(near) if any(_holds(b.dims, d) for b in self.largest)]
        self.needs = np.array(covered, dtype=np.int64).reshape(len(covered), len(planned[0].dims))
        self.weights = np.array([near[d] for d in covered])

    def add_planned(self, cost: float, price: Callable[[Bucket], float]) -> None:
        """Adds a need of the size of each planned bucket, which costs ``cost`` there."""
        sizes = np.array([b.dims for b in self.planned], dtype=np.int64)
        self.needs = np.concatenate([self.needs, sizes])
        self.weights = np.concatenate([self.weights, [cost / (price(b) or 1.0) for b in self.planned]])

    def _align(self, cells: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        """Returns the needs rounded up to the sizes that buckets can have."""
        units, found = self.plan.policy.alignment[self.stage], dict[tuple[int, ...], float]()
        for dims, weight in cells.items():
            at = tuple(-(-d // unit) * unit for d, unit in zip(dims, units, strict=True))
            found[at] = found.get(at, 0.0) + weight
        return found

    def _spread(self, cells: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        """Returns the needs with shares of each at the sizes near it (``SPREAD``); images keep their sizes."""
        if self.stage is Stage.VISION or not cells:
            return cells
        units = self.plan.policy.alignment[self.stage]
        most = [max(sizes) for sizes in zip(*(b.dims for b in self.planned), strict=True)]
        shares = [
            {n: _shares_near(n, unit, top) for n in {d[axis] for d in cells}}
            for axis, (unit, top) in enumerate(zip(units, most, strict=True))
        ]
        found: dict[tuple[int, ...], float] = {}
        for dims, weight in cells.items():
            for near in itertools.product(*(of[n].items() for of, n in zip(shares, dims, strict=True))):
                at = tuple(size for size, _ in near)
                if self.stage is Stage.DECODE and len(at) == 2:
                    at = at[0], max(at)  # each row has a block
                found[at] = found.get(at, 0.0) + weight * math.prod(share for _, share in near)
        least = LEAST_SHARE * sum(cells.values())
        return {dims: weight for dims, weight in found.items() if weight > least or dims in cells}

    @cached_property
    def candidates(self) -> list[Bucket]:
        """Returns the covers and the sizes of needs, on a grid that is made coarser until they are few."""
        units = self.plan.policy.alignment[self.stage]
        for points in (64, 32, 16, 8, 6, 4, 3, 2):
            axes = [
                sorted({_round_up(int(n), unit, points) for n in set(column.tolist())})
                for column, unit in zip(self.needs.T, units, strict=True)
            ]
            dims = list_tight_sizes(axes, self.needs) if len(self.needs) else []
            if len(dims) <= MAX_CANDIDATES:
                break
        made = {Bucket(self.stage, d, self.variant) for d in dims if any(_holds(b.dims, d) for b in self.largest)}
        return sorted({*made, *self.covers})

    def table(
        self, price: Callable[[Bucket], float], charge: float = 0.0, present: Collection[Bucket] = ()
    ) -> CostTable:
        """Returns the costs of the needs in the candidates; those that are not ``present`` cost ``charge``."""
        covers, known = set(self.covers), set(present)
        forced = np.array([b in covers for b in self.candidates])
        dims = np.array([b.dims for b in self.candidates], dtype=np.int64)
        charges = np.array([charge * (b not in known) for b in self.candidates]) if charge else None
        return CostTable(self._costs(dims, [price(b) for b in self.candidates]), forced, charges)

    def static_cost(self, price: Callable[[Bucket], float]) -> float:
        """Returns the cost of the needs in the plan of the limits."""
        dims = np.array([b.dims for b in self.planned], dtype=np.int64)
        costs = self._costs(dims, [price(b) for b in self.planned])
        return float(costs.min(axis=1).sum()) if len(costs) else 0.0

    def _costs(self, dims: NDArray[np.int64], prices: Sequence[float]) -> NDArray[np.float64]:
        """Returns [needs, candidates]: the weighted cost of a need in a candidate, infinite where it does not fit."""
        weighted: NDArray[np.float64] = compute_costs(self.stage, self.needs, dims, prices) * self.weights[:, None]
        return weighted


def list_tight_sizes(axes: Sequence[Sequence[int]], needs: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Returns the cells of a grid whose needs touch each of their upper edges; others hold no more needs.

    Args:
        axes: ascending sizes of each axis.
        needs: [needs, axes], each at most the largest size of its axis.
    """
    if len(axes) == 1:
        return [(n,) for n in axes[0]]
    first = np.searchsorted(axes[0], needs[:, 0])
    second = np.searchsorted(axes[1], needs[:, 1])
    used = np.zeros((len(axes[0]), len(axes[1])), bool)
    used[first, second] = True
    rows = np.maximum.accumulate(used, axis=1)  # a need of this first size, of at most this second one
    columns = np.maximum.accumulate(used, axis=0)
    return [(axes[0][i], axes[1][j]) for i, j in zip(*np.nonzero(rows & columns), strict=True)]


def compute_costs(
    stage: Stage, needs: NDArray[np.int64], dims: NDArray[np.int64], prices: Sequence[float]
) -> NDArray[np.float64]:
    """Returns [needs, buckets]: the cost of a need in a bucket, infinite where it does not fit.

    Args:
        needs: [needs, axes].
        dims: [buckets, axes].
        prices: cost of a launch of each bucket.
    """
    price = np.array(prices)
    if not len(needs):
        return np.zeros((0, len(dims)))
    fits = (needs[:, None, :] <= dims[None, :, :]).all(axis=2)
    found: NDArray[np.float64] = np.where(fits, price[None, :], np.inf)
    if stage is Stage.FRESH and len(dims[0]) == 2:
        launches = -(-needs[:, :1] // dims[None, :, 0])  # prompts of one launch may also run in several
        several = np.where(needs[:, 1:] <= dims[None, :, 1], launches * price[None, :], np.inf)
        found = np.minimum(found, several)
    return found


def _shares_near(size: int, unit: int, most: int) -> dict[int, float]:
    """Returns the shares of a need of ``size`` at the sizes near it, each a multiple of ``unit`` up to ``most``."""
    found: dict[int, float] = {}
    for steps, share in SPREAD:
        near = min(max(round(size * 2 ** (steps / 16)), 1), most)
        near = min(-(-round_to_grid(near) // unit) * unit, max(most, size)) if steps else size
        found[near] = found.get(near, 0.0) + share
    return found


def _round_up(size: int, unit: int, points: int) -> int:
    """Returns ``size`` rounded up to a multiple of ``unit`` and to 1/``points`` of its octave."""
    step = max((1 << (max(size, 1).bit_length() - 1)) // points, 1)
    step = -(-step // unit) * unit
    return -(-size // step) * step
