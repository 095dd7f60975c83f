"""The geometry of images that Qwen2-VL and Qwen2.5-VL share."""

from __future__ import annotations

PATCH = 14
"""Pixels along a side of a patch of an image."""

TEMPORAL, CHANNELS = 2, 3
PATCH_VALUES = CHANNELS * TEMPORAL * PATCH * PATCH
"""Values of one patch, uint8 on the host: channels x frames x height x width."""

MERGE = 2
"""Patches along a side of a merge cell, which becomes one token of the decoder."""

CELL = MERGE * MERGE
"""Patches of a merge cell."""

FACTOR = PATCH * MERGE
"""Pixels along a side of a merge cell."""

WINDOW_CELLS = 4
"""Merge cells along a side of an attention window of Qwen2.5-VL's tower."""

WINDOW_PATCHES = WINDOW_CELLS * MERGE
