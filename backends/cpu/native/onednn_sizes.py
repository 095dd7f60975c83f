"""The numbers of rows that oneDNN is called with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

SIZES: tuple[int, ...] = (1, 4, 6, 8, 12, *range(16, 128, 8), 128, 160, 192, 256, 512)
"""Numbers of rows of a product, the only ones that oneDNN is called with."""

PASS = 20
"""Fixed cost of one more product with the same weight, in rows: the weight is read from memory again."""


def by_sizes(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``multiply(x)``, which treats rows independently, computed in calls of ``SIZES`` rows."""
    parts, start = list[Tensor](), 0
    for size in pieces(len(x)) or (0,):
        part = x[start : start + size]
        surplus = size - len(part)
        parts.append(multiply(functional.pad(part, (0, 0, 0, surplus)) if surplus else part))
        start += size
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y[: len(x)] if start > len(x) else y


def pieces(rows: int) -> tuple[int, ...]:
    """Returns ``SIZES`` that add up to at least ``rows``; surplus rows are computed if that is faster than another
    product.

    oneDNN makes kernels for each number of rows and each shape of weight and keeps 0.6 MB for each, half of it in a
    table without a limit. If every number of rows were a size of its own, memory would grow for hours, with each new
    prompt length and mix of clients, and each new number would be slow once.
    """
    return (SIZES[-1],) * (rows // SIZES[-1]) + _RESTS[rows % SIZES[-1]]


@cache
def _rest(rows: int) -> tuple[int, ...]:
    """Returns ``pieces`` for fewer rows than the largest size."""
    if rows == 0:
        return ()
    index = bisect_left(SIZES, rows)
    above = SIZES[index]
    if above == rows or index == 0:
        return (above,)
    below = SIZES[index - 1]
    split = (below, *_rest(rows - below))
    return (above,) if above + PASS <= sum(split) + PASS * len(split) else split


_RESTS = tuple(_rest(rows) for rows in range(SIZES[-1]))
