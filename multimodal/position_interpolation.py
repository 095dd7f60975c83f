"""Interpolates a square table of position embeddings to an image's patch grid (bilinear). Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trencadis.core.step import Encode, Float32, Int32, VisionInputs
from trencadis.multimodal.patch_packing import count_slots, patch_coordinates

NEIGHBOURS = 4
"""Rows of the table between which a position lies."""


def interpolate_axis(position: Int32, count: int, side: int) -> tuple[Int32, Float32]:
    """Returns the two neighbouring table positions, int32 [n, 2], and their weights, float32 [n, 2], of ``count``
    positions along one axis.

    The first and the last position are those of the table. All in float32, as in the reference: a wider type would give
    other weights.
    """
    exact = position.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    floor = np.floor(exact)
    both = np.minimum(floor.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), side - 1)
    distance = np.abs((exact[:, None] - floor[:, None]) - np.arange(2, dtype=np.float32))
    return both, np.maximum(np.float32(1) - distance, np.float32(0))


@lru_cache(maxsize=256)
def interpolated_positions(h: int, w: int, side: int, merge: int) -> tuple[Int32, Float32]:
    """Returns for each patch of a grid the four neighbouring rows of the table, int32 [h x w, 4], and their weights,
    float32 [h x w, 4].
    """
    coordinates = patch_coordinates(h, w, merge)
    rows, row_shares = interpolate_axis(coordinates[:, 0], h, side)
    columns, column_shares = interpolate_axis(coordinates[:, 1], w, side)
    near = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, NEIGHBOURS)
    return near.astype(np.int32), (row_shares[:, :, None] * column_shares[:, None, :]).reshape(-1, NEIGHBOURS)


def add_interpolated_positions(packed: VisionInputs, images: Sequence[Encode], side: int, merge: int) -> VisionInputs:
    """Adds to packed images each patch's neighbours in a table of ``side`` x ``side`` positions and their weights."""
    slots, slot = len(packed.pixels), 0
    packed.position_rows, packed.position_weights = (
        np.zeros((slots, NEIGHBOURS), np.int32),
        np.zeros((slots, NEIGHBOURS), np.float32),
    )
    for image in images:
        t, h, w = image.grid
        for _ in range(t):
            span = slice(slot, slot + h * w)
            packed.position_rows[span], packed.position_weights[span] = interpolated_positions(h, w, side, merge)
            slot += count_slots((1, h, w), windows=False)
    return packed
