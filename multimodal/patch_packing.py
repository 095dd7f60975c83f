"""Packs images of any size into a launch: cell by cell, each temporal patch a segment of attention. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trencadis.core.shared_constants import SINK_ROW, WINDOW_SLOTS
from trencadis.core.step import Encode, Int32, VisionInputs
from trencadis.multimodal.patch_grids import count_slots


@lru_cache(maxsize=256)
def patch_coordinates(h: int, w: int, merge: int) -> Int32:
    """Returns row and column of each patch of a grid, int32 [h x w, 2], cell by cell; a cell has ``merge`` x
    ``merge`` patches.
    """
    cell, part = np.divmod(np.arange(h * w, dtype=np.int32), merge * merge)
    row, column = np.divmod(cell, w // merge)
    return np.stack([row * merge + part // merge, column * merge + part % merge], axis=1).astype(np.int32)


def pack_whole_images(images: Sequence[Encode], slots: int, values: int, merge: int) -> VisionInputs:
    """Packs images one after the other into ``slots`` slots; each temporal patch, and each window of padding, is one
    segment of attention.

    Args:
        images: their ``pixels`` are uint8 [patches, values], their ``rows`` int32 [cells].
        slots: a multiple of 64 that holds them all.
        values: number of values of a slot.
        merge: patches along a side of a cell.
    """
    cell = merge * merge
    packed = VisionInputs(
        pixels=np.zeros((slots, values), np.uint8),
        position=np.zeros((slots, 2), np.int32),
        segment=np.zeros(slots // WINDOW_SLOTS, np.int32),
        count=np.full(slots // WINDOW_SLOTS, WINDOW_SLOTS, np.int32),
        rows=np.full(slots // cell, SINK_ROW, np.int32),
    )
    slot = segment = 0
    for image in images:
        t, h, w = image.grid
        real, size = h * w, count_slots((1, h, w), windows=False)
        for frame in range(t):
            here = slice(slot, slot + real)
            packed.pixels[here] = image.pixels[frame * real : (frame + 1) * real]
            packed.position[here] = patch_coordinates(h, w, merge)
            windows = slice(slot // WINDOW_SLOTS, (slot + size) // WINDOW_SLOTS)
            packed.segment[windows] = segment
            packed.count[windows.stop - 1] = real - (size - WINDOW_SLOTS)
            first = slot // cell
            packed.rows[first : first + real // cell] = image.rows[frame * real // cell : (frame + 1) * real // cell]
            slot, segment = slot + size, segment + 1
    spare = len(packed.segment) - slot // WINDOW_SLOTS
    packed.segment[slot // WINDOW_SLOTS :] = segment + np.arange(spare, dtype=np.int32)
    return packed
