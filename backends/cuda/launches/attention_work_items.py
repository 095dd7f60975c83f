"""Work items: which queries of a text launch attend to which keys or images, planned on the host. Pure numpy.

A block of queries is some tokens of one row. If its keys are more than a fair share of a processor's work, they are cut
into pieces of equal length, which are attended to separately and joined in the order of their keys. No item is longer
than a share, which is a ``bucket_capacity.WAVES``-th of a processor's part: a free processor takes the next item,
so that none works longer than 1 + 1 / WAVES of the mean.

In cross-attention a block of queries is some tokens of the launch, of one request or of several: it attends to every
image that any of them sees, up to the last row that any of them sees. A block whose images are more than a fair share
of a processor's work is cut: then each span of each of its images is an item.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trencadis.backends.cuda.launches.bucket_capacity import LEAST, ItemCapacity
from trencadis.core.media_spans import RESERVED_ROWS

Int32 = NDArray[np.int32]

STEP = 128
"""Pieces begin at multiples of this many keys, which all tiles of keys divide."""

END = 1 << 30
"""End of a block's last piece: the kernel stops at the last key that its tokens see."""

HORIZON = 32
"""Number of tokens for which a plan of decoding rows stays valid: each last piece may have so many keys more."""


class QueryBlocks(NamedTuple):
    """Blocks of queries that share their keys."""

    row: Int32
    token: Int32  # the first of them, as an index among the row's tokens in this launch
    keys: Int32  # number of keys that they see, from the row's first


class Items(NamedTuple):
    """Arrays at the bucket's size for the fields of ``ItemAttn`` with the same names."""

    item_row: Int32
    item_token: Int32
    item_begin: Int32
    item_stop: Int32
    item_part: Int32
    join_row: Int32
    join_token: Int32
    join_part: Int32


def blocks_of(context: Int32, counts: Int32, tokens: int, upto: Int32 | None = None) -> QueryBlocks:
    """Returns the blocks of all rows in order.

    Args:
        context, counts: int32 [r] stored keys and new tokens of each row.
        tokens: maximum tokens of a block.
        upto: int32 [n] the last visible key of each token, if that may be after its own position.
    """
    held = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), held)
    token = (np.arange(len(row), dtype=np.int32) - np.repeat(held.cumsum() - held, held)) * tokens
    keys = context[row] + np.minimum(token + tokens, counts[row])
    if upto is not None and len(row):
        keys = np.maximum(keys, np.maximum.reduceat(upto, (counts.cumsum() - counts)[row] + token) + 1)
    return QueryBlocks(row, token.astype(np.int32), keys.astype(np.int32))


def plan_items(blocks: QueryBlocks, capacity: ItemCapacity) -> Items:
    """Plans items by descending length, each with the index of its partial result, or -1 if its result is final."""
    each, share = cut_blocks(blocks.keys, capacity)
    item = np.repeat(np.arange(len(each)), each)
    piece = np.arange(len(item)) - np.repeat(each.cumsum() - each, each)
    begin = piece * share[item]
    stop = np.where(piece + 1 == each[item], END, begin + share[item])
    if capacity.span:  # every item of a block that is cut writes a result for each of its spans
        ends = -(-blocks.keys[item] // capacity.span) * capacity.span
        stop = np.where(each[item] > 1, np.minimum(stop, ends), stop)
    length = np.minimum(stop, blocks.keys[item]) - begin
    joined = np.flatnonzero(each > 1)
    parts = each[joined] if not capacity.span else -(-blocks.keys[joined] // capacity.span)
    ends = parts.cumsum()
    first_part = np.full(len(each), -1, np.int64)
    first_part[joined] = ends - parts
    part = first_part[item] + np.where(first_part[item] < 0, 0, piece if not capacity.span else begin // capacity.span)
    order = np.argsort(-length, kind="stable")
    join_part = np.full(capacity.joins + 1, ends[-1] if len(ends) else 0, np.int32)
    join_part[: len(joined)] = ends - parts
    return Items(
        padded(blocks.row[item][order], capacity.items, -1),
        padded(blocks.token[item][order], capacity.items),
        padded(begin[order], capacity.items),
        padded(stop[order], capacity.items),
        padded(part[order], capacity.items, -1),
        padded(blocks.row[joined], capacity.joins, -1),
        padded(blocks.token[joined], capacity.joins),
        join_part,
    )


def cut_blocks(keys: Int32, capacity: ItemCapacity) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (pieces of each block, keys of each piece but the last) that the capacity allows."""
    step = capacity.span or STEP
    share = max(int(keys.sum()) // capacity.shares // step * step, LEAST, step)
    while True:
        long = keys > share
        parts = -(-keys[long] // (capacity.span or share))
        if len(parts) <= capacity.joins and parts.sum() <= capacity.parts:
            break
        share = -(-17 * share // 16 // step) * step
    each, size = np.ones(len(keys), np.int64), np.full(len(keys), share, np.int64)
    even = -(-keys[long] // -(-keys[long] // share))
    size[long] = -(-even // step) * step
    each[long] = -(-keys[long] // size[long])
    return each, size


def padded(values: NDArray[Any], size: int, rest: int = 0) -> Int32:
    """Returns int32 [size]: ``values``, then ``rest``."""
    assert len(values) <= size, f"{len(values)} items do not fit {size}"
    out = np.full(size, rest, np.int32)
    out[: len(values)] = values
    return out


class ItemPlans:
    """Caches the last work-item plan of a bucket: decoding rows that have only advanced reuse its pieces."""

    def __init__(self) -> None:
        self.made = 0
        """Number of plans made so far."""
        self._lengths: Int32 | None = None
        self._last: Items | None = None

    def single(self, context: Int32, surplus: int, capacity: ItemCapacity) -> Items:
        """Plans rows of one token each, and ``surplus`` tokens of no row.

        A plan is reused while all rows are at most HORIZON tokens further than when it was made: the kernel finds the
        end of
        its last pieces.
        """
        if self._last is not None and self._lengths is not None and len(self._lengths) == len(context):
            further = context - self._lengths
            if not len(further) or (0 <= further[0] < HORIZON and bool((further == further[0]).all())):
                return self._last
        self._lengths = context.copy()
        self._last = self.several(context, np.ones(len(context), np.int32), surplus, 1, capacity)
        return self._last

    def several(
        self,
        context: Int32,
        counts: Int32,
        surplus: int,
        tokens: int,
        capacity: ItemCapacity,
        upto: Int32 | None = None,
    ) -> Items:
        """Plans rows of any number of tokens."""
        self.made += 1
        real: Any = blocks_of(context, counts, tokens, upto)
        idle = np.arange(0, surplus, tokens, dtype=np.int32)
        if len(idle):
            rest = QueryBlocks(np.full(len(idle), capacity.rows, np.int32), idle, np.zeros(len(idle), np.int32))
            real = QueryBlocks(*map(np.concatenate, zip(real, rest, strict=True)))
        return plan_items(real, capacity)


class CrossAttentionItemArrays(NamedTuple):
    """Arrays at the bucket's size for the fields of ``CrossAttentionItems`` with the same names."""

    cross_token: Int32
    cross_unit: Int32
    cross_last: Int32
    cross_begin: Int32
    cross_part: Int32
    merge_token: Int32
    merge_part: Int32


def plan_cross_items(reach: Int32, each: int, capacity: ItemCapacity) -> CrossAttentionItemArrays:
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
            self._reach, self._last = reach.copy(), plan_cross_items(reach, each, capacity)
        return self._last


class LaunchPlans(ItemPlans):
    """Caches of all plans of one bucket's launches."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_attention = CrossAttentionPlans()


def first_rows_of(units: Int32, length: int) -> Int32:
    """Returns int32 [u]: the first arena row of each image, of ``length`` rows each."""
    return (units * length + RESERVED_ROWS).astype(np.int32)
