"""Where a patch's position lies in a table of fewer or more positions, and pictures packed with it. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trencadis.core.step import Encode, Float32, Int32, VisionInputs
from trencadis.multimodal.grids import slots_of
from trencadis.multimodal.packing import places

NEAR = 4
"""Rows of the table that a position lies between."""


def along(place: Int32, count: int, side: int) -> tuple[Int32, Float32]:
    """(int32 [n, 2] places in the table, float32 [n, 2] shares) of places of ``count`` along one axis.

    The first and the last of them are those of the table. All in float32, as in the reference: shares of a wider type
    would be others.
    """
    exact = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    floor = np.floor(exact)
    both = np.minimum(floor.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), side - 1)
    apart = np.abs((exact[:, None] - floor[:, None]) - np.arange(2, dtype=np.float32))
    return both, np.maximum(np.float32(1) - apart, np.float32(0))


@lru_cache(maxsize=256)
def near_positions(h: int, w: int, side: int, merge: int) -> tuple[Int32, Float32]:
    """(int32 rows of the table, float32 shares), [h x w, 4] each, of a grid's patches, cell by cell."""
    place = places(h, w, merge)
    rows, row_shares = along(place[:, 0], h, side)
    columns, column_shares = along(place[:, 1], w, side)
    near = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, NEAR)
    return near.astype(np.int32), (row_shares[:, :, None] * column_shares[:, None, :]).reshape(-1, NEAR)


def placed(packed: VisionInputs, images: Sequence[Encode], side: int, merge: int) -> VisionInputs:
    """``packed`` (``packing.pack_whole``) with each patch's place in a table of ``side`` x ``side`` positions."""
    slots, slot = len(packed.pixels), 0
    packed.near, packed.share = np.zeros((slots, NEAR), np.int32), np.zeros((slots, NEAR), np.float32)
    for image in images:
        t, h, w = image.grid
        for _ in range(t):
            here = slice(slot, slot + h * w)
            packed.near[here], packed.share[here] = near_positions(h, w, side, merge)
            slot += slots_of((1, h, w), windows=False)
    return packed
