"""Checks of the memory that kernels read and write, enabled by ``TRENCADIS_CPU_CHECKS``: kernels check nothing
themselves.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.core import envs

VARIABLE = "TRENCADIS_CPU_CHECKS"


@cache
def enabled() -> bool:
    """Returns True if kernels' arguments are checked in this process."""
    return bool(envs.get_bool(VARIABLE))


def check_range(what: str, values: Tensor | NDArray[np.int32], low: int, high: int) -> None:
    """Raises IndexError unless all values are in [low, high)."""
    held = torch.as_tensor(values)
    if held.numel() and (int(held.min()) < low or int(held.max()) >= high):
        raise IndexError(f"{what}: {int(held.min())} to {int(held.max())}, of which [{low}, {high}) exist")


def check_blocks(
    blocks: Tensor, row: NDArray[np.int32], first: NDArray[np.int32], length: NDArray[np.int32], size: int, count: int
) -> None:
    """Raises IndexError unless the keys [first, length) of the rows ``row`` of a block table are in blocks that exist.

    Args:
        blocks: int32 [rows, width], numbers of blocks of ``size`` slots, below ``count``.
    """
    check_range("rows of the block table", row, 0, len(blocks))
    check_range("first keys", first, 0, blocks.shape[1] * size + 1)
    check_range("ends of keys", length, 0, blocks.shape[1] * size + 1)
    for at, start, stop in zip(row.tolist(), first.tolist(), length.tolist(), strict=True):
        if start < stop:
            check_range(f"blocks of row {at}", blocks[at, start // size : (stop - 1) // size + 1], 0, count)


def check_spans(spans: NDArray[np.int64], queries: int, slots: int) -> None:
    """Raises IndexError unless spans (``Span`` of flash.h, int64 [n, 10]) name rows and slots that exist."""
    for first, count, rows, slot, keys, places, *_ in spans.tolist():
        if not rows:
            check_range("queries of a span", np.array([first, first + count], np.int32), 0, queries + 1)
        if not places:
            check_range("slots of a span", np.array([slot, slot + keys], np.int32), 0, slots + 1)
