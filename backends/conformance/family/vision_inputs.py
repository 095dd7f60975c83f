"""Inputs of VISION launches for the checks: items that leave padding in every window, or whole tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from trencadis.core.checkpoint import registry
from trencadis.core.checkpoint.model_config import ModelConfig, reserved_rows
from trencadis.core.shared_constants import SINK_ROW, WINDOW_SLOTS
from trencadis.core.step import Encode, VisionInputs
from trencadis.core.vision_config import SlotForm

IMAGE_SLOTS = 1024
"""Slots of the largest launch, unless three tiles need more."""

IMAGE_SIZE = (224, 168)
"""Height and width of an image whose tiles are packed."""

LONGEST_ITEM = 7
"""Maximum windows of an item that is not a tile."""


def most_slots(tile: int) -> int:
    """Returns the slots of the largest VISION launch."""
    return max(IMAGE_SLOTS, 3 * tile)


def tile_of(config: ModelConfig) -> int:
    """Returns the slots of a tile, for models whose images are tiles; 0: launches have any number of windows."""
    return 0 if config.vision is None else registry.image_needs(config, {}).tile


def make_inputs(model: Any, config: ModelConfig, slots: int, rng: np.random.Generator) -> tuple[VisionInputs, int]:
    """Returns items that leave padding, and how many windows they use; for models of tiles, ``model.pack`` packs
    whole tiles.
    """
    tile = tile_of(config)
    assert config.vision is not None
    if not tile:
        return _pack_items(slots, config.vision.slot, rng), _used_windows(slots)
    item, items = registry.image_sizes(config, {})(*IMAGE_SIZE).item, []
    for i in range(max(slots // tile - 1, 1)):
        pixels = rng.integers(0, 256, (item.patches, config.vision.slot.values), dtype=np.uint8)
        first = reserved_rows(config) + i * item.tokens
        rows = np.arange(first, first + item.tokens, dtype=np.int32)
        items.append(Encode(str(i), item.grid, item.slots, pixels, rows))
    made: VisionInputs = model.pack(items, slots)
    return made, len(items) * tile // WINDOW_SLOTS


def _used_windows(slots: int) -> int:
    """Returns how many windows contain an image."""
    return max(slots // WINDOW_SLOTS - 1, 1)


def _pack_items(slots: int, slot: SlotForm, rng: np.random.Generator) -> VisionInputs:
    """Returns items that fill all windows but one; no window that ends an item is full."""
    used, count, row = _used_windows(slots), slots // WINDOW_SLOTS, SINK_ROW + 1
    made = VisionInputs(
        pixels=np.zeros((slots, slot.values), np.uint8),
        position=np.zeros((slots, 2), np.int32),
        segment=np.arange(count, dtype=np.int32) // LONGEST_ITEM,
        count=np.full(count, WINDOW_SLOTS, np.int32),
        rows=np.full(slots // slot.cell, SINK_ROW, np.int32),
    )
    if slot.position_neighbours:
        made.position_rows = np.zeros((slots, slot.position_neighbours), np.int32)
        made.position_weights = np.zeros((slots, slot.position_neighbours), np.float32)
    made.segment[used:] = made.segment[used - 1] + 1 + np.arange(count - used)
    cells = WINDOW_SLOTS // slot.cell
    for window in range(used):
        last = window + 1 == used or (window + 1) % LONGEST_ITEM == 0
        real = max(cells * 9 // 16, 1) if last else cells - cells // 4
        start = window * WINDOW_SLOTS
        here = slice(start, start + real * slot.cell)
        made.pixels[here] = rng.integers(0, 256, (real * slot.cell, slot.values))
        made.position[here] = rng.integers(0, 30, (real * slot.cell, 2))
        if made.position_rows is not None and made.position_weights is not None:
            made.position_rows[here] = rng.integers(0, 4, (real * slot.cell, slot.position_neighbours))
            made.position_weights[here] = rng.random((real * slot.cell, slot.position_neighbours))
        made.count[window] = real * slot.cell
        made.rows[start // slot.cell : start // slot.cell + real] = np.arange(row, row + real)
        row += real
    return made
