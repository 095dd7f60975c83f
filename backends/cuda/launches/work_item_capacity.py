"""Capacity of a bucket for attention's work items (launches/attention_work_items.py). Pure Python, for the planner."""

from __future__ import annotations

from typing import NamedTuple

from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import (
    IMAGE_SPAN,
    LONG,
    SPAN,
    cross_attention_lanes,
    lanes_of,
)
from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.cross_attention_inputs import planned_units

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
