"""Compile mode: the numbers of rows that parts beside the layers are compiled for, shared by buckets. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

PIECES = (1, 4, 16, 64, 512, 4096)
"""Rows of a piece. A launch of up to 256 rows has four at most, a larger one eight up to 32,768."""

STARTS = (32, 128, 512, 2048, 8192)
"""Tokens that the start of a text launch is padded to; above them powers of two.

It embeds and rotates no more than four times what it has to, which a layer does in less than a hundredth of its time.
"""


class StoredPiece(NamedTuple):
    """Rows [start, stop) of a launch."""

    start: int
    stop: int


def pieces(rows: int, sizes: Sequence[int] = PIECES) -> Iterator[StoredPiece]:
    """Pieces of one of ``sizes`` that cover ``rows`` > 0 of them; the last one may repeat rows of the one before."""
    size = max(p for p in sizes if p <= rows)
    for start in range(0, rows, size):
        begun = min(start, rows - size)
        yield StoredPiece(begun, begun + size)


def padded_start(tokens: int) -> int:
    """How many tokens the start of a launch of ``tokens`` is compiled for."""
    return next((s for s in STARTS if s >= tokens), 1 << (tokens - 1).bit_length())
