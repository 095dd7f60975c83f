"""Compile mode: the row counts that parts outside the layers are compiled for, shared by buckets. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

PIECES = (1, 4, 16, 64, 512, 4096)
"""Numbers of rows of a piece. A launch of up to 256 rows has at most four pieces, one of up to 32,768 at most eight."""

STARTS = (32, 128, 512, 2048, 8192)
"""Numbers of tokens to which the start of a text launch is padded; beyond them, powers of two.

Embedding and rotary factors cover at most four times the tokens, which takes less than a hundredth of a layer's time.
"""


class StoredPiece(NamedTuple):
    """Rows [start, stop) of a launch."""

    start: int
    stop: int


def pieces(rows: int, sizes: Sequence[int] = PIECES) -> Iterator[StoredPiece]:
    """Yields pieces of one of ``sizes`` that cover ``rows`` > 0 rows; the last one may repeat rows of the one
    before.
    """
    size = max(p for p in sizes if p <= rows)
    for start in range(0, rows, size):
        begun = min(start, rows - size)
        yield StoredPiece(begun, begun + size)


def padded_start(tokens: int) -> int:
    """Returns the number of tokens that the start of a launch of ``tokens`` is compiled for."""
    return next((s for s in STARTS if s >= tokens), 1 << (tokens - 1).bit_length())
