"""Work items of attention to pictures: which tokens of a launch attend to which of their rows. Pure numpy.

A block of queries is some tokens of the launch, of one request or of several: it attends to the pictures that any of
them sees, as far as the one that sees most of each. Blocks whose pictures are more than a fair share of a processor's
work are cut: each span of each of their pictures is an item then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trencadis.backends.cuda.launches.items import Int32, ItemPlans, cut, padded
from trencadis.backends.cuda.launches.sizes import ItemRoom
from trencadis.core.layout import RESERVED_ROWS


class SightItems(NamedTuple):
    """Arrays at the bucket's size for the fields of ``SeenItems`` with the same names."""

    sight_token: Int32
    sight_unit: Int32
    sight_last: Int32
    sight_begin: Int32
    sight_part: Int32
    merge_token: Int32
    merge_part: Int32


def plan(reach: Int32, each: int, room: ItemRoom) -> SightItems:
    """Items by descending length.

    Args:
        reach: int32 [tokens, u] rows of each picture that a token sees.
        each: tokens of a block.
    """
    first = np.arange(0, len(reach), each, dtype=np.int32)
    spans = -(-np.maximum.reduceat(reach, first, axis=0) // room.span)
    count = spans.sum(1, dtype=np.int32)
    pieces, _ = cut(count * room.span, room)
    whole, cuts = np.flatnonzero(pieces == 1), np.flatnonzero(pieces > 1)
    there = spans[whole] > 0
    begins = np.where(there.any(1), there.argmax(1), 0)
    ends = np.where(there.any(1), there.shape[1] - there[:, ::-1].argmax(1), 0)
    of_unit = spans[cuts].ravel()
    unit = np.repeat(np.tile(np.arange(spans.shape[1]), len(cuts)), of_unit)
    place = np.arange(len(unit))
    begin = (place - np.repeat(of_unit.cumsum() - of_unit, of_unit)) * room.span
    order = np.argsort(-np.concatenate([count[whole], np.ones(len(unit), np.int32)]), kind="stable")
    nothing = np.zeros(len(whole), np.int32)
    columns = (
        (first[whole], np.repeat(first[cuts], count[cuts]), -1), (begins, unit, 0), (ends, unit + 1, 0),
        (nothing, begin, 0), (nothing - 1, place, -1),
    )  # fmt: skip
    parts = np.concatenate([[0], count[cuts].cumsum()])
    items = (padded(np.concatenate([of, more])[order], room.items, rest) for of, more, rest in columns)
    joins = padded(first[cuts], room.joins, -1), padded(parts, room.joins + 1, parts[-1])
    return SightItems._make((*items, *joins))


class SightPlans:
    """Plans of one bucket's launches, the last one kept: decoding rows see the same step by step."""

    def __init__(self) -> None:
        self.made = 0
        """Plans made so far."""
        self._reach = np.zeros((0, 0), np.int32)
        self._kept: SightItems | None = None

    def of(self, reach: Int32, each: int, room: ItemRoom) -> SightItems:
        """As ``plan``."""
        if self._kept is None or not np.array_equal(self._reach, reach):
            self.made += 1
            self._reach, self._kept = reach.copy(), plan(reach, each, room)
        return self._kept


class LaunchPlans(ItemPlans):
    """All plans of one bucket's launches."""

    def __init__(self) -> None:
        super().__init__()
        self.sights = SightPlans()


def first_rows_of(units: Int32, length: int) -> Int32:
    """int32 [u]: the first arena row of each picture, of ``length`` rows each."""
    return (units * length + RESERVED_ROWS).astype(np.int32)
