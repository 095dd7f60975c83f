"""Constants that several packages share: reserved blocks and rows, windows of slots, limits of clips. No imports."""

from __future__ import annotations

ZERO_BLOCK, SINK_BLOCK = 0, 1
"""KV blocks outside the pool: ZERO is read by padding and never written, SINK is written by padding and never read."""

RESERVED_BLOCKS = 2

ZERO_ROW, SINK_ROW = 0, 1
"""Arena rows with the same roles; arena row 0 in ``image_row`` means the token's own embedding."""

RESERVED_ROWS = 2

WINDOW_SLOTS = 64
"""VISION slots of a window, the unit of the tower's masks; real slots come first in it."""

MAX_CLIP_FRAMES = 768
"""Most frames that are taken of a clip, unless the server says otherwise."""

MAX_CLIP_SECONDS = 3600.0
"""Longest clip, unless the server says otherwise."""


def align_up(width: int, unit: int) -> int:
    """``width`` with zeros behind it: the next multiple of ``unit``."""
    return -(-width // unit) * unit
