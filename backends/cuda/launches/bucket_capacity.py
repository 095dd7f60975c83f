"""Capacity of a bucket for attention's work items (launches/attention_work_items.py), and the bytes of its inputs.

``input_buffers.InputBuffers`` lays the static inputs out in the same way. Pure Python, for the planner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import (
    IMAGE_SPAN,
    LONG,
    SPAN,
    cross_attention_lanes,
    lanes_of,
)
from trencadis.core.buckets import LORA, Bucket, Stage, drafts_ahead, padded_tokens
from trencadis.core.cross_attention_inputs import planned_units
from trencadis.core.device_shape_policy import InputSizes
from trencadis.core.request import MAX_BIAS

LEAST = 256
"""Fewest keys of a piece: with fewer, joining partial results takes longer than another processor saves."""


WAVES, JOIN_FACTOR = 5, 8
"""Pieces of the longest size per processor's part of the work, so that the slowest processor has at most 1 + 1 / WAVES
of the mean; and pieces that there is memory for, since those that begin at whole steps are shorter.
"""


class ItemCapacity(NamedTuple):
    """Capacity of a bucket for work items (launches/attention_work_items.py).

    ``parts`` bounds partial results; a block that is cut has at least two. ``shares``: number of longest pieces into
    which the work of a KV head is divided. ``span``: cuts are at multiples of it; 0: anywhere.
    """

    rows: int
    items: int
    joins: int
    parts: int
    shares: int
    span: int


def block_tokens(bucket: Bucket, group: int, alike: bool) -> int:
    """Returns the tokens of a block of queries; ``group``: query heads per KV head."""
    if bucket.stage is Stage.DECODE and not alike:
        return 1
    return max(lanes_of(padded_tokens(bucket), alike) // max(group, 1), 1)


def item_capacity(
    bucket: Bucket, group: int, processors: int, kv_heads: int, longest: int, alike: bool
) -> ItemCapacity:
    """Returns the capacity that any launch of ``bucket`` needs; ``longest``: keys of the longest possible row."""
    tokens, rows = padded_tokens(bucket), bucket.dims[-1]
    each = block_tokens(bucket, group, alike)
    blocks = tokens if each == 1 else tokens // each + rows + 1
    shares, heads = -(-longest // LEAST) * blocks, max(kv_heads, 1)
    joins = max(min(JOIN_FACTOR * processors // heads, shares) // 2, 1)
    return ItemCapacity(
        rows, blocks + 2 * joins, joins, 2 * joins, max(WAVES * processors // heads, 1), SPAN if alike else 0
    )


def cross_attention_block_tokens(bucket: Bucket, group: int) -> int:
    """Returns the tokens of a block of queries that uses cross-attention; ``group``: query heads per KV head."""
    return max(cross_attention_lanes(bucket.stage is Stage.DECODE) // max(group, 1), 1)


def cross_attention_capacity(bucket: Bucket, group: int, processors: int, kv_heads: int, length: int) -> ItemCapacity:
    """Returns the capacity that cross-attention needs in any launch of ``bucket``; ``length``: arena rows of an image.

    Partial results take at most as much memory as those of text: if they are smaller, there are more of them.
    """
    heads, lanes = max(kv_heads, 1), cross_attention_lanes(bucket.stage is Stage.DECODE)
    blocks = -(-bucket.dims[0] // cross_attention_block_tokens(bucket, group))
    spans = planned_units(bucket.variant) * -(-length // IMAGE_SPAN)
    parts = max(min(blocks * spans, JOIN_FACTOR * processors * (LONG // lanes) // heads), 2)
    joins = max(min(blocks, parts // 2), 1)
    return ItemCapacity(0, blocks + parts, joins, parts, max(WAVES * processors // heads, 1), IMAGE_SPAN)


ALIGNMENT = 256
"""Each tensor begins at a multiple of this many bytes, so that kernels see the same alignment in every bucket."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100, assumed by the planner without a card."""


def align_up(size: int) -> int:
    """Rounds ``size`` up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def cross_attention_bytes(bucket: Bucket, sizes: InputSizes, processors: int = PROCESSORS) -> int:
    """Returns the bytes of partial results of cross-attention, which a text launch holds at a time."""
    if not planned_units(bucket.variant):
        return 0
    capacity = cross_attention_capacity(
        bucket, sizes.group, processors, sizes.kv_heads, sizes.slot.cross_attention_rows
    )
    lanes = cross_attention_lanes(bucket.stage is Stage.DECODE)
    return 4 * capacity.parts * sizes.kv_heads * lanes * (sizes.head_dim + 2)


def input_bytes(bucket: Bucket, sizes: InputSizes, processors: int = PROCESSORS, invariant: bool = False) -> int:
    """Returns the bytes of all of a bucket's input tensors, which ``cuda_host_arrays.arrays`` builds."""
    return sum(map(align_up, _tensors(bucket, sizes, processors, invariant)))


def _tensors(bucket: Bucket, sizes: InputSizes, processors: int, invariant: bool) -> Iterator[int]:
    """Yields the bytes of each tensor."""
    count, bits = bucket.dims[0], -(-sizes.vocab // 8)
    match bucket.stage:
        case Stage.PREFILL | Stage.DECODE | Stage.VERIFY:
            count = padded_tokens(bucket)
            longest = sizes.row_blocks * sizes.block_size
            capacity = item_capacity(bucket, sizes.group, processors, sizes.kv_heads, longest, invariant)
            yield from _text(count, bucket.dims[-1], sizes)
            yield from (*(4 * capacity.items,) * 5, *(4 * capacity.joins,) * 2, 4 * (capacity.joins + 1))
            if sizes.recurrent:
                yield from (*(8 * (bucket.dims[-1] + 1),) * 2, *(4 * (bucket.dims[-1] + 1),) * 2)
            if sizes.upto and (bucket.stage is not Stage.DECODE or invariant):
                yield 4 * count
            if bucket.variant == LORA:
                yield 4 * count
            if units := planned_units(bucket.variant):
                cross_attention = cross_attention_capacity(
                    bucket, sizes.group, processors, sizes.kv_heads, sizes.slot.cross_attention_rows
                )
                yield from (*(4 * units,) * 2, *(4 * count * units,) * 2, 4 * count, *(4 * cross_attention.items,) * 5)
                yield from (4 * cross_attention.joins, 4 * (cross_attention.joins + 1))
        case Stage.VISION:
            windows = count // 64
            yield from (sizes.slot.values * count, 4 * 2 * count, 8 * sizes.slot.cells(count), *(4 * windows,) * 6)
            yield from (4 * sizes.slot.position_neighbours * count,) * 2
            yield from (4 * windows,) * (4 if sizes.slot.padding_windows else 0)
            if bucket.variant == LORA:
                yield from (4 * count, 4 * sizes.slot.cells(count))
        case Stage.SAMPLE:
            yield from (*(8 * count,) * 4, *(4 * count,) * 8)
            if ahead := drafts_ahead(bucket):
                yield from (8 * count, 8 * count * ahead)
            yield bits * (1 if bucket.variant == "greedy" else count + 1)
        case Stage.RESET:
            yield from (8 * count, 4 * sizes.vocab * count, bits * count, 8 * MAX_BIAS * count, 4 * MAX_BIAS * count)
        case Stage.POOL:
            yield from (8 * count, 4 * count)
        case _:
            raise ValueError(f"{bucket} is no stage of this device")


def _text(tokens: int, rows: int, sizes: InputSizes) -> Iterator[int]:
    """Yields the bytes of ids, slots, positions, image rows, out rows; row starts, contexts, blocks, slot map, block
    starts.
    """
    yield from (4 * tokens, 4 * tokens, 4 * 3 * tokens, 4 * tokens, 8 * tokens)
    yield from (4 * (rows + 2), 4 * (rows + 1), 4 * rows * sizes.row_blocks, 8 * tokens, 4 * (rows + 2))
