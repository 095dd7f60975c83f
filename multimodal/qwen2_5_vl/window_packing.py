"""Packs images in attention windows of 64 patch slots. Pure numpy.

The processor orders an image's patches by merge cell (2 x 2 patches), cells row by row. A window holds 8 x 8 patches,
that is 4 x 4 cells, row by row. Windows at the right and lower edge hold fewer cells, which fill the first of their 64
slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trencadis.core.launch_inputs import VisionInputs
from trencadis.core.media_spans import SINK_ROW
from trencadis.core.step import Encode, Int32
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import MERGE, WINDOW_CELLS

CELL = MERGE * MERGE
"""Patches of a merge cell; each cell becomes one token."""


@dataclass(frozen=True)
class WindowLayout:
    """Layout of one temporal patch of h x w patches in windows; s slots."""

    patch: Int32  # [s] patch of each slot in the processor's order; -1: padding
    position: Int32  # [s, 2] patch row and column; 0 in padding
    count: Int32  # [s / 64] real patches of each window
    cell: Int32  # [s / 4] raster number of each merged slot's token; -1: padding


@lru_cache(maxsize=256)
def window_layout(h: int, w: int) -> WindowLayout:
    """Returns the layout of one temporal patch of h x w patches (both even)."""
    rows, columns = h // 2, w // 2
    grid = np.full((-(-rows // WINDOW_CELLS) * WINDOW_CELLS, -(-columns // WINDOW_CELLS) * WINDOW_CELLS), -1, np.int32)
    grid[:rows, :columns] = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    tiles = grid.reshape(grid.shape[0] // WINDOW_CELLS, WINDOW_CELLS, -1, WINDOW_CELLS).transpose(0, 2, 1, 3)
    cells = tiles.reshape(-1, WINDOW_CELLS * WINDOW_CELLS)
    order = np.argsort(cells < 0, axis=1, kind="stable")  # real cells first, in their order
    cell = np.take_along_axis(cells, order, axis=1)
    real = np.repeat(cell.reshape(-1), CELL) >= 0
    part = np.tile(np.arange(CELL, dtype=np.int32), cell.size)
    owner = np.repeat(cell.reshape(-1), CELL)
    position = np.stack([owner // columns * 2 + part // 2, owner % columns * 2 + part % 2], axis=1)
    position[~real] = 0
    count = (cell >= 0).sum(axis=1).astype(np.int32) * CELL
    patch = np.where(real, owner * CELL + part, -1).astype(np.int32)
    return WindowLayout(patch, position.astype(np.int32), count, cell.reshape(-1))


def pack_windows(images: Sequence[Encode], slots: int) -> VisionInputs:
    """Packs images one after the other into ``slots`` slots.

    Each temporal patch is one segment of attention; each spare window is a segment of its own, filled with zeros.

    Args:
        images: their ``pixels`` are uint8 [patches, patch values], their ``rows`` int32 [tokens].
        slots: a multiple of 64 that holds them all.

    Returns:
        The packed inputs; see the fields of ``VisionInputs`` for shapes.
    """
    values = images[0].pixels.shape[1] if images else 0
    packed = _empty_inputs(slots, values)
    slot = segment = 0
    for image in images:
        t, h, w = image.grid
        layout = window_layout(h, w)
        size = len(layout.patch)
        real = layout.patch >= 0
        for frame in range(t):
            here = slice(slot, slot + size)
            source = image.pixels[frame * h * w : (frame + 1) * h * w]
            packed.pixels[here][real] = source[layout.patch[real]]
            packed.position[here] = layout.position
            windows = slice(slot // WINDOW_SLOTS, (slot + size) // WINDOW_SLOTS)
            packed.count[windows] = layout.count
            packed.segment[windows] = segment
            rows = image.rows[frame * h * w // CELL : (frame + 1) * h * w // CELL]
            packed.rows[slot // CELL : (slot + size) // CELL] = _arena_rows(rows, layout.cell)
            slot, segment = slot + size, segment + 1
    spare = len(packed.segment) - slot // WINDOW_SLOTS
    packed.segment[slot // WINDOW_SLOTS :] = segment + np.arange(spare, dtype=np.int32)
    return packed


def _empty_inputs(slots: int, values: int) -> VisionInputs:
    return VisionInputs(
        pixels=np.zeros((slots, values), np.uint8),
        position=np.zeros((slots, 2), np.int32),
        segment=np.zeros(slots // WINDOW_SLOTS, np.int32),
        count=np.full(slots // WINDOW_SLOTS, WINDOW_SLOTS, np.int32),
        rows=np.full(slots // CELL, SINK_ROW, np.int32),
    )


def _arena_rows(rows: Int32, cell: Int32) -> NDArray[np.int32]:
    return np.where(cell >= 0, rows[np.maximum(cell, 0)], SINK_ROW).astype(np.int32)
