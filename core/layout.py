"""Numbers that several rooms share: reserved blocks and rows, the geometry of images, limits of clips. No imports."""

from __future__ import annotations

ZERO_BLOCK, SINK_BLOCK = 0, 1
"""KV blocks outside the pool: ZERO is read by padding and never written, SINK is written by padding and never read."""

RESERVED_BLOCKS = 2

ZERO_ROW, SINK_ROW = 0, 1
"""Arena rows with the same roles; arena row 0 in ``image_row`` means the token's own embedding."""

RESERVED_ROWS = 2

PATCH = 14
"""Pixels along a side of a patch of an image."""

TEMPORAL, CHANNELS = 2, 3
PATCH_VALUES = CHANNELS * TEMPORAL * PATCH * PATCH
"""Values of one patch, uint8 on the host: channels x frames x height x width."""

MERGE = 2
"""Patches along a side of a merge cell, which becomes one token of the decoder."""

FACTOR = PATCH * MERGE
"""Pixels along a side of a merge cell."""

WINDOW_CELLS = 4
"""Merge cells along a side of an attention window of the vision tower."""

WINDOW_PATCHES = WINDOW_CELLS * MERGE
WINDOW_SLOTS = WINDOW_PATCHES * WINDOW_PATCHES
"""Patch slots of one window, also where the edge of the image cuts it."""

MAX_CLIP_FRAMES = 768
"""Most frames that are taken of a clip, unless the server says otherwise."""

MAX_CLIP_SECONDS = 3600.0
"""Longest clip, unless the server says otherwise."""


def aligned(width: int, unit: int) -> int:
    """``width`` with zeros behind it: the next multiple of ``unit``."""
    return -(-width // unit) * unit
