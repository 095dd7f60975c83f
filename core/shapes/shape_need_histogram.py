"""Records which shapes traffic needs, before launches are padded: a bounded histogram of sizes. Torch-free.

It holds sizes and weights only: no text, hash or name of a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.shapes.rectangular_launches import RowNeed, best_groups

MAX_CELLS = 4096
HALF_LIFE_SECONDS = 6 * 3600.0

RECORDED_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.FRESH, Stage.CONTEXT, Stage.VISION)

Key = tuple[Stage, str]
"""Stage and variant of a need."""


GRID_POINTS = 16
FINE_POINTS = 64
FINE_AXES = frozenset({(Stage.FRESH, 1), (Stage.VISION, 0)})
"""Stages and axes with ``FINE_POINTS`` sizes an octave: images of the same resolution need the same size each time."""


def round_to_grid(size: int, points: int = GRID_POINTS) -> int:
    """Returns ``size`` rounded up to 1/``points`` of its octave; sizes up to twice as many are exact."""
    step = max((1 << (size.bit_length() - 1)) // points, 1)
    return -(-size // step) * step


def round_need(stage: Stage, dims: Sequence[int]) -> tuple[int, ...]:
    """Returns the size of the cell that counts a need."""
    return tuple(
        round_to_grid(max(d, 1), FINE_POINTS if (stage, axis) in FINE_AXES else GRID_POINTS)
        for axis, d in enumerate(dims)
    )


class NeedCell(NamedTuple):
    """Needs of one size, and their weight."""

    key: Key
    dims: tuple[int, ...]
    weight: float


@dataclass
class NeedHistogram:
    """Weights of needs by stage, variant and size; the weight of a need halves every ``half_life`` seconds.

    At most ``most`` cells are kept: the lightest ones merge into the next larger size that holds them.
    """

    half_life: float = HALF_LIFE_SECONDS
    most: int = MAX_CELLS
    cells: dict[Key, dict[tuple[int, ...], float]] = field(default_factory=dict)
    _unit: float = 1.0
    _now: float = 0.0

    @property
    def count(self) -> int:
        """Number of cells."""
        return sum(len(found) for found in self.cells.values())

    def advance(self, seconds: float) -> None:
        """Lets ``seconds`` of load pass, so that later needs weigh more."""
        self._now += seconds
        self._unit = 2.0 ** (self._now / self.half_life)
        if self._unit > 1e9:
            self.scale(1 / self._unit)
            self._unit, self._now = 1.0, 0.0

    def add(self, stage: Stage, dims: Sequence[int], weight: float = 1.0, variant: str = "") -> None:
        """Counts one need."""
        cells = self.cells.setdefault((stage, variant), {})
        at = round_need(stage, dims)
        cells[at] = cells.get(at, 0.0) + weight * self._unit
        if len(cells) > self.most // 8 and self.count > self.most:
            self._merge_lightest()

    def merge(self, other: NeedHistogram) -> None:
        """Adds the present weights of another histogram."""
        for (stage, variant), cells in other.cells.items():
            for dims, weight in cells.items():
                self.add(stage, dims, weight / other._unit, variant)

    def list_cells(self, least: float = 0.0) -> list[NeedCell]:
        """Returns every cell of at least the present weight ``least``, sorted."""
        return sorted(
            NeedCell(key, dims, weight / self._unit)
            for key, cells in self.cells.items()
            for dims, weight in cells.items()
            if weight / self._unit >= least
        )

    def scale(self, factor: float) -> None:
        """Multiplies every weight by ``factor``."""
        for cells in self.cells.values():
            for dims in cells:
                cells[dims] *= factor

    def _merge_lightest(self) -> None:
        """Merges the lightest cells until an eighth of the cells is free."""
        order = sorted((weight, key, dims) for key, cells in self.cells.items() for dims, weight in cells.items())
        excess, grids = self.count - self.most * 7 // 8, dict[Key, _CellGrid]()
        for _, key, dims in order:
            if excess <= 0:
                return
            grid = grids.get(key) or grids.setdefault(key, _CellGrid(self.cells[key]))
            heir = grid.remove(dims)
            if heir is not None:
                self.cells[key][heir] += self.cells[key].pop(dims)
                excess -= 1


class _CellGrid:
    """The sizes of one key as an array, since thousands of cells may look for the next larger one at a time."""

    def __init__(self, cells: Iterable[tuple[int, ...]]) -> None:
        self._names = sorted(cells)
        self._index = {dims: i for i, dims in enumerate(self._names)}
        self._sizes = np.array(self._names, dtype=np.float64)
        self._areas = self._sizes.prod(axis=1)

    def remove(self, dims: tuple[int, ...]) -> tuple[int, ...] | None:
        """Removes a cell; returns the smallest other one that holds its needs, or keeps it and returns None."""
        own = self._index[dims]
        area, self._areas[own] = self._areas[own], np.inf
        larger = np.where((self._sizes >= self._sizes[own]).all(axis=1), self._areas, np.inf)
        heir = int(larger.argmin())
        if not np.isfinite(larger[heir]):
            self._areas[own] = area
            return None
        return self._names[heir]


def count_step(
    histogram: NeedHistogram, rows: Sequence[RowNeed], images: Sequence[int], plan: Plan, variant: str = ""
) -> None:
    """Counts the needs of one step: ``rows``, and the slots of the ``images`` that it encodes."""
    for need in list_needs(rows, images, plan):
        histogram.add(need.stage, need.dims, 1.0, "" if need.stage is Stage.VISION else variant)


def list_needs(rows: Sequence[RowNeed], images: Sequence[int], plan: Plan) -> Iterator[Bucket]:
    """Yields the launches of a step as they would be if every size were planned.

    Rows with drafts are left out of rectangular launches: the buckets of VERIFY are not chosen by needs.
    """
    yield from _vision_needs(images, plan)
    rows = rows if plan.policy.mixed else [n for n in rows if not n.drafted]
    if not rows:
        return
    if plan.policy.mixed:
        tokens = sum(n.tokens for n in rows)
        decoding = tokens == len(rows)
        yield Bucket(Stage.DECODE, (tokens,)) if decoding else Bucket(Stage.PREFILL, (tokens, len(rows)))
        return
    yield from _fresh_needs([n for n in rows if n.tokens > 1 and n.context == 0], plan)
    for n in rows:
        if n.tokens > 1 and n.context > 0:
            yield from _context_needs(n, plan)
    yield from _decode_needs([n for n in rows if n.tokens == 1], plan)


def _fresh_needs(rows: Sequence[RowNeed], plan: Plan) -> Iterator[Bucket]:
    """Yields (rows, tokens) of prompts without context; prompts share a launch where that costs less."""
    policy = plan.policy
    lengths = sorted((n.tokens for n in rows), reverse=True)
    short = [t for t in lengths if t <= policy.fresh_tokens]
    yield from (Bucket(Stage.FRESH, (1, t)) for t in lengths if t > policy.fresh_tokens)

    def price(start: int, stop: int) -> float:
        count, tokens = stop - start, short[start]
        if count > 1 and count * tokens > policy.merge_tokens:
            return math.inf
        return policy.cost(Bucket(Stage.FRESH, (count, tokens)))

    for start, stop in best_groups(len(short), price, ()):
        yield Bucket(Stage.FRESH, (stop - start, short[start]))


def _context_needs(need: RowNeed, plan: Plan) -> Iterator[Bucket]:
    block, context, left = max(plan.block_size, 1), need.context, need.tokens
    most = max(plan.sizes(Stage.CONTEXT), default=left)
    while left > 0:
        size = min(left, most)
        if size > 1:
            yield Bucket(Stage.CONTEXT, (size, -(-context // block)))
        context, left = context + size, left - size


def _decode_needs(rows: Sequence[RowNeed], plan: Plan) -> Iterator[Bucket]:
    """Yields (rows, blocks), cut where the rows list more blocks than the largest launch takes."""
    block, most = max(plan.block_size, 1), max(plan.sizes(Stage.DECODE, 1), default=0)
    count = total = 0
    for n in rows:
        own = n.context // block + 1
        if count and most and total + own > most:
            yield Bucket(Stage.DECODE, (count, total))
            count = total = 0
        count, total = count + 1, total + own
    if count:
        yield Bucket(Stage.DECODE, (count, total))


def _vision_needs(images: Iterable[int], plan: Plan) -> Iterator[Bucket]:
    """Yields the slots of launches into which the images of a step are packed, first-fit."""
    waiting = list(images)
    while waiting:
        free, left = max(plan.policy.encoder_slots, waiting[0]), list[int]()
        total = 0
        for slots in waiting:
            if total + slots <= free:
                total += slots
            else:
                left.append(slots)
        yield Bucket(Stage.VISION, (total,))
        waiting = left
