"""Cuts the keys of decoding rows into pieces. Pure numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trencadis.backends.cuda.launches.sizes import LEAST

Int32 = NDArray[np.int32]

STEP = 128
"""Pieces begin at multiples of this many keys: every tile of keys divides it."""


class Splits(NamedTuple):
    """Arrays at the bucket's size for the fields of ``SplitDecodeAttn`` with the same names."""

    row_split: Int32
    split_row: Int32
    split_start: Int32
    split_stop: Int32


def cut(lengths: Int32, rows: int, room: int) -> Splits:
    """Pieces of about equal length, as many as there is room for.

    Args:
        lengths: int32 [r] keys of each real row, r <= rows.
        room: from ``sizes.capacity``.
    """
    real = len(lengths)
    spare = max(room - real, 1)
    size = -(-max(-(-int(lengths.sum()) // spare), LEAST) // STEP) * STEP
    count = -(-lengths // size)
    row_split = np.full(rows + 1, int(count.sum()), np.int32)
    row_split[0] = 0
    np.cumsum(count, out=row_split[1 : real + 1])
    used = int(row_split[-1])
    assert used <= room, f"{used} pieces do not fit {room}"
    row = np.repeat(np.arange(real), count)
    start = (np.arange(used) - row_split[row]) * size
    split_row, split_start, split_stop = (np.zeros(room, np.int32) for _ in range(3))
    split_row[:used], split_start[:used] = row, start
    split_stop[:used] = np.minimum(start + size, lengths[row])
    return Splits(row_split, split_row, split_start, split_stop)
