"""The plan that chooses buckets. Pure Python: no torch, no numpy.

``Plan.fit`` is the only place where a bucket is chosen; warm-up iterates the same immutable plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device_shape_policy import Policy


def escape(need: int, unit: int = 1) -> int:
    """Returns the size for a need above every boundary: the next multiple of 1/8 of its leading power of two.

    This limits the number of such shapes. The result is divisible by ``unit``.
    """
    step = max(unit, (1 << (need.bit_length() - 1)) // 8)
    step = -(-step // unit) * unit
    return -(-need // step) * step


@dataclass(frozen=True)
class Plan:
    """The shapes of one engine, immutable and versioned. ``fit`` maps needs to the cheapest bucket that holds them.

    Args:
        buckets: every planned bucket; needs of other stages are rounded by the policy's alignment and boundaries.
        block_size: tokens of a KV block (0: the policy has no axis of blocks).
        notes: lines about what the planner changed or dropped.
        whole: prompts are never cut into chunks, because all their tokens attend to each other.
        units: images in the arena that tokens of one launch may attend to; 0: there is no cross-attention, or any
            number is a valid size.
        drafts: most drafts of a row of VERIFY; 0: there is no such stage.
    """

    policy: Policy
    version: int = 1
    buckets: tuple[Bucket, ...] = ()
    block_size: int = 0
    notes: tuple[str, ...] = ()
    whole: bool = False
    units: int = 0
    drafts: int = 0

    @cached_property
    def _tables(self) -> dict[tuple[Stage, str], BucketTable]:
        lists: dict[tuple[Stage, str], list[Bucket]] = {}
        for bucket in self.buckets:
            lists.setdefault((bucket.stage, bucket.variant), []).append(bucket)
        return {key: BucketTable(found, self.policy.cost) for key, found in lists.items()}

    def of(self, stage: Stage) -> tuple[Bucket, ...]:
        """Returns the planned buckets of one stage, ascending."""
        return tuple(sorted(b for b in self.buckets if b.stage is stage))

    def find(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> Bucket | None:
        """Returns the cheapest planned bucket that holds ``needs``; None if there is none."""
        table = self._tables.get((stage, variant))
        return None if table is None else table.find(needs)

    def table(self, stage: Stage, variant: str = "") -> BucketTable | None:
        """Returns the lookup table of one stage, for callers with thousands of needs; None if nothing is planned."""
        return self._tables.get((stage, variant))

    def sizes(self, stage: Stage, axis: int = 0) -> tuple[int, ...]:
        """Returns the sizes of one axis over the planned buckets of a stage, ascending."""
        table = next((t for (s, _), t in self._tables.items() if s is stage), None)
        return () if table is None else tuple(table.axes[axis])

    def fit(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> Bucket:
        """Returns the bucket for ``needs``, one need per axis of the stage; the result does not depend on what is
        captured.
        """
        table = self._tables.get((stage, variant))
        if table is not None:
            return table.find(needs) or self._escape(stage, needs, variant, table)
        return self._rounded(stage, needs, variant)

    @cached_property
    def _rounded(self) -> Callable[[Stage, tuple[int, ...], str], Bucket]:
        """``_round`` with a cache, since decoding asks for the same bucket in each step."""
        return lru_cache(maxsize=256)(self._round)

    def _round(self, stage: Stage, needs: tuple[int, ...], variant: str) -> Bucket:
        """Returns the bucket of a stage without a plan: needs rounded to alignment and boundaries."""
        axes = self.policy.axes[stage]
        if len(needs) != len(axes):
            raise ValueError(f"{stage.name} has axes {axes}, got needs {needs}")
        units, lists = self.policy.alignment[stage], self.policy.boundaries.get(stage, ((),) * len(axes))
        dims = tuple(_fit_axis(max(n, 1), a, b) for n, a, b in zip(needs, units, lists, strict=True))
        return Bucket(stage, dims, variant)

    def _escape(self, stage: Stage, needs: tuple[int, ...], variant: str, table: BucketTable) -> Bucket:
        """Returns a bucket for needs above all planned ones."""
        unit = self.policy.alignment[stage]
        dims = tuple(_fit_axis(max(n, 1), a, tuple(s)) for n, a, s in zip(needs, unit, table.axes, strict=True))
        return Bucket(stage, dims, variant)

    def is_within_boundaries(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> bool:
        """Returns True if no need lies above the stage's boundaries, i.e. no escape shape is necessary."""
        if (stage, variant) in self._tables:
            return self.find(stage, needs, variant) is not None
        lists = self.policy.boundaries.get(stage, ())
        return all(not b or n <= b[-1] for n, b in zip(needs, lists, strict=False))


class BucketTable:
    """The cheapest bucket for every cell of one stage, computed once; a lookup is one bisection per axis."""

    def __init__(self, buckets: list[Bucket], cost: Callable[[Bucket], float]) -> None:
        self.axes = [sorted(set(sizes)) for sizes in zip(*(b.dims for b in buckets), strict=True)]
        self._flat = len(self.axes) == 1
        columns = self.axes[1] if len(self.axes) > 1 else [0]
        own = {b.dims: (cost(b), b) for b in buckets}
        width = len(columns)
        rows: list[list[tuple[float, Bucket] | None]] = [[None] * (width + 1) for _ in range(len(self.axes[0]) + 1)]
        for i in reversed(range(len(self.axes[0]))):
            for j in reversed(range(width)):
                dims = (self.axes[0][i],) if self._flat else (self.axes[0][i], columns[j])
                rows[i][j] = _cheapest(own.get(dims), rows[i + 1][j], rows[i][j + 1])
        self._rows = rows

    def find_with_cost(self, needs: tuple[int, ...]) -> tuple[float, Bucket] | None:
        """Returns (cost, bucket) of the cell; None if a need lies above the list."""
        row = self._rows[bisect_left(self.axes[0], needs[0])]
        return row[0] if self._flat else row[bisect_left(self.axes[1], needs[1])]

    def find(self, needs: tuple[int, ...]) -> Bucket | None:
        """Returns the cell's bucket; None if a need lies above the list."""
        found = self.find_with_cost(needs)
        return None if found is None else found[1]


def _cheapest(*found: tuple[float, Bucket] | None) -> tuple[float, Bucket] | None:
    return min((c for c in found if c is not None), key=lambda c: (c[0], c[1].dims), default=None)


def _fit_axis(need: int, alignment: int, boundaries: tuple[int, ...]) -> int:
    return _fit_listed_size(need, alignment, boundaries) if boundaries else -(-need // alignment) * alignment


def _fit_listed_size(need: int, alignment: int, boundaries: tuple[int, ...]) -> int:
    """Returns the size for ``need`` on an axis with a list of sizes."""
    i = bisect_left(boundaries, need)
    return boundaries[i] if i < len(boundaries) else escape(need, alignment)
