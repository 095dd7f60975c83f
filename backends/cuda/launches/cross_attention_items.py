"""Work items of cross-attention: which tokens of a launch attend to which images. Pure numpy.

A block of queries is some tokens of the launch, of one request or of several: it attends to every image that any of
them sees, up to the last row that any of them sees. A block whose images are more than a fair share of a processor's
work is cut: then each span of each of its images is an item.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trencadis.backends.cuda.launches.input_sizes import ItemCapacity
from trencadis.backends.cuda.launches.work_items import Int32, ItemPlans, cut_blocks, padded
from trencadis.core.shared_constants import RESERVED_ROWS


class CrossAttentionItemArrays(NamedTuple):
    """Arrays at the bucket's size for the fields of ``CrossAttentionItems`` with the same names."""

    cross_token: Int32
    cross_unit: Int32
    cross_last: Int32
    cross_begin: Int32
    cross_part: Int32
    merge_token: Int32
    merge_part: Int32


def plan(reach: Int32, each: int, capacity: ItemCapacity) -> CrossAttentionItemArrays:
    """Plans the items, by descending length.

    Args:
        reach: int32 [tokens, u] rows of each image that a token sees.
        each: tokens of a block.
    """
    first = np.arange(0, len(reach), each, dtype=np.int32)
    spans = -(-np.maximum.reduceat(reach, first, axis=0) // capacity.span)
    count = spans.sum(1, dtype=np.int32)
    pieces, _ = cut_blocks(count * capacity.span, capacity)
    whole, cuts = np.flatnonzero(pieces == 1), np.flatnonzero(pieces > 1)
    there = spans[whole] > 0
    begins = np.where(there.any(1), there.argmax(1), 0)
    ends = np.where(there.any(1), there.shape[1] - there[:, ::-1].argmax(1), 0)
    of_unit = spans[cuts].ravel()
    unit = np.repeat(np.tile(np.arange(spans.shape[1]), len(cuts)), of_unit)
    index = np.arange(len(unit))
    begin = (index - np.repeat(of_unit.cumsum() - of_unit, of_unit)) * capacity.span
    order = np.argsort(-np.concatenate([count[whole], np.ones(len(unit), np.int32)]), kind="stable")
    nothing = np.zeros(len(whole), np.int32)
    columns = (
        (first[whole], np.repeat(first[cuts], count[cuts]), -1), (begins, unit, 0), (ends, unit + 1, 0),
        (nothing, begin, 0), (nothing - 1, index, -1),
    )  # fmt: skip
    parts = np.concatenate([[0], count[cuts].cumsum()])
    items = (padded(np.concatenate([of, more])[order], capacity.items, rest) for of, more, rest in columns)
    joins = padded(first[cuts], capacity.joins, -1), padded(parts, capacity.joins + 1, parts[-1])
    return CrossAttentionItemArrays._make((*items, *joins))


class CrossAttentionPlans:
    """Caches the last plan: while rows only decode, their cross-attention stays the same."""

    def __init__(self) -> None:
        self.made = 0
        """Number of plans made so far."""
        self._reach = np.zeros((0, 0), np.int32)
        self._last: CrossAttentionItemArrays | None = None

    def of(self, reach: Int32, each: int, capacity: ItemCapacity) -> CrossAttentionItemArrays:
        """Returns ``plan`` of the arguments, or the last plan if ``reach`` is unchanged."""
        if self._last is None or not np.array_equal(self._reach, reach):
            self.made += 1
            self._reach, self._last = reach.copy(), plan(reach, each, capacity)
        return self._last


class LaunchPlans(ItemPlans):
    """Caches of all plans of one bucket's launches."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_attention = CrossAttentionPlans()


def first_rows_of(units: Int32, length: int) -> Int32:
    """Returns int32 [u]: the first arena row of each image, of ``length`` rows each."""
    return (units * length + RESERVED_ROWS).astype(np.int32)
