"""Constants that several packages share: reserved blocks and rows, windows of slots, limits of video clips.

No imports.
"""

from __future__ import annotations

ZERO_BLOCK, SINK_BLOCK = 0, 1
"""KV blocks outside the pool: ZERO is read by padding and never written, SINK is written by padding and never read."""

RESERVED_BLOCKS = 2

ZERO_ROW, SINK_ROW = 0, 1
"""Arena rows with the same roles; arena row 0 in ``image_row`` means the token's own embedding."""

RESERVED_ROWS = 2

WINDOW_SLOTS = 64
"""VISION slots per window, the unit of the tower's masks; real slots come first in it."""

MAX_CLIP_FRAMES = 768
"""Default limit of the frames taken from a clip."""

MAX_CLIP_SECONDS = 3600.0
"""Default limit of a clip's duration in seconds."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Reasoning efforts of a request."""


DRAFTED_ROWS = 64
"""Most rows of SAMPLE in a step with drafts, unless more requests run at a time."""

HEAD_STATES = 3
"""Layers of a model whose hidden states a head of EAGLE-3 reads."""


def align_up(width: int, unit: int) -> int:
    """Returns the next multiple of ``unit``: the width after zero padding."""
    return -(-width // unit) * unit
