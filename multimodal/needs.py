"""What pictures may need of a device, from the image processor's limits. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trencadis.core.buckets import WINDOW_SLOTS
from trencadis.core.planning import Images
from trencadis.multimodal.limits import checked, processor_config, server_options
from trencadis.multimodal.sizes import FACTOR, PATCH, WINDOW_PATCHES, largest_slots, largest_tokens

MIN_PIXELS, MAX_PIXELS = 3136, 12_845_056
"""Qwen2.5-VL's limits, where a checkpoint names none."""


def pixel_limits(path: Path, kwargs: Mapping[str, Any], factor: int = FACTOR) -> tuple[int, int]:
    """(min_pixels, max_pixels): what was asked for, else the checkpoint's.

    Raises:
        StartupError: unknown keys, or limits that no picture can keep.
    """
    asked = server_options(kwargs).pixels
    raw = processor_config(path) or {}
    size = raw.get("size") or {}
    least = asked.get("min_pixels") or raw.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS
    most = asked.get("max_pixels") or raw.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS
    checked(int(least), int(most), factor)
    return int(least), int(most)


def factor_of(alignment: str) -> int:
    """Pixels that the sides of a resized picture are multiples of."""
    return WINDOW_PATCHES * PATCH if alignment == "resize" else FACTOR


def needs(path: Path, asked: Mapping[str, Any], alignment: str = "pad") -> Images:
    """Slots and tokens of the largest picture, slots of the smallest; with ``resize`` every window is full."""
    factor = factor_of(alignment)
    least, most = pixel_limits(path, asked, factor)
    smallest = -(-least // PATCH**2)
    if alignment == "resize":
        smallest = WINDOW_SLOTS * max(least // factor**2, 1)
    return Images(largest_slots(least, most, factor), smallest, largest_tokens(least, most, factor), factor)
