"""Packs images of any size into a launch: cell by cell, each temporal patch a segment of attention. Pure numpy.

Patch grids of images: checks the aspect ratio, counts tokens and VISION slots. Pure Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from trencadis.core.errors import BadRequest
from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.step import Encode, Float32, Int32
from trencadis.core.vision_config import WINDOW_SLOTS

Grid = tuple[int, int, int]
"""Number of patches (t, h, w)."""

MAX_ASPECT = 200
"""Largest ratio of the longer side to the shorter."""

PATCH, MERGE, SIDE = 14, 2, 8
"""Default sizes: pixels along a patch, patches along a merge cell and patches along a window."""


def check_aspect(height: int, width: int) -> None:
    """Checks that an image has pixels and an aspect ratio of at most ``MAX_ASPECT``.

    Raises:
        BadRequest: a side below 1 pixel, or the longer side is more than ``MAX_ASPECT`` times the shorter.
    """
    if height < 1 or width < 1:
        raise BadRequest("The image has no pixels.")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadRequest(f"The image's aspect ratio is above {MAX_ASPECT}.")


def patch_grid(height: int, width: int, patch: int = PATCH) -> Grid:
    """Returns the patches (t, h, w) of one image resized to ``height`` x ``width`` pixels."""
    return 1, height // patch, width // patch


def count_tokens(grid: Grid, merge: int = MERGE) -> int:
    """Returns the decoder tokens of a grid: one per ``merge`` x ``merge`` patches."""
    return grid[0] * grid[1] * grid[2] // (merge * merge)


def count_slots(grid: Grid, windows: bool = True) -> int:
    """Returns the VISION slots of a grid (t, h, w): 64 for each window of 8 x 8 patches, even if the edge cuts it.

    Without ``windows``, as many as there are patches, in multiples of 64.
    """
    t, h, w = grid
    if not windows:
        return t * WINDOW_SLOTS * -(-h * w // WINDOW_SLOTS)
    return t * WINDOW_SLOTS * -(-h // SIDE) * -(-w // SIDE)


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


def join_neighbours(rows: tuple[Int32, Float32], columns: tuple[Int32, Float32], side: int) -> tuple[Int32, Float32]:
    """Returns for each patch its rows of a table of ``side`` x ``side`` positions, int32 [patches, near], and their
    weights, float32, from those of its two axes, [patches, near of the axis] each.
    """
    near = rows[0][:, :, None] * side + columns[0][:, None, :]
    shares = rows[1][:, :, None] * columns[1][:, None, :]
    return near.reshape(len(near), -1).astype(np.int32), shares.reshape(len(near), -1)


def add_positions(
    packed: VisionInputs, images: Sequence[Encode], near: int, find: Callable[[int, int], tuple[Int32, Float32]]
) -> VisionInputs:
    """Adds to packed images each patch's ``near`` rows of the table of positions, and their weights.

    Args:
        find: (height, width) of a grid -> rows and weights of its patches, as ``join_neighbours`` returns them.
    """
    slots, slot = len(packed.pixels), 0
    packed.position_rows = np.zeros((slots, near), np.int32)
    packed.position_weights = np.zeros((slots, near), np.float32)
    for image in images:
        t, h, w = image.grid
        for _ in range(t):
            span = slice(slot, slot + h * w)
            packed.position_rows[span], packed.position_weights[span] = find(h, w)
            slot += count_slots((1, h, w), windows=False)
    return packed
