"""Sizes of query blocks, and positions of cuts between keys, for both the host's plans and the kernels. Torch-free."""

from __future__ import annotations

SPAN = 1024
"""Keys between two positions where ``--batch-invariant`` may cut: the same for every token, whether or not it is cut.
"""

SINGLE, SHORT, LONG = 16, 32, 128
"""Query heads times tokens of a block of queries, in launches of one token per row, of few tokens, and of many."""

IMAGE_SPAN = 512
"""Rows of an image between two positions where attention to it may be cut, in every launch.

Each span is attended to separately, so the position of the cuts changes no bit.
"""

DRAWN, READ = 16, 64
"""Query heads times tokens of a block that uses cross-attention, in launches of one token per row, and in all others.
"""

FEW = 128
"""Launches of fewer tokens have short blocks, which keep more processors busy."""

MANY = 512
"""From this many tokens on, tiles of a block have its full length on all cards; with fewer, only where products are by
warp groups, since elsewhere a decoding row in a mixed launch would wait for the products of a tile's empty rows.
"""


def lanes_of(tokens: int, alike: bool) -> int:
    """Returns query heads times tokens of a block of queries, in a launch of ``tokens`` tokens in rows of any
    length.

    The keys of a block may be cut, so that a few hundred tokens behind a long prefix keep all processors busy with long
    blocks, too.
    """
    return SHORT if alike or tokens < FEW else LONG


def cross_attention_lanes(single: bool) -> int:
    """Returns query heads times tokens of a block that uses cross-attention; ``single``: launches of one token per
    row.
    """
    return DRAWN if single else READ
