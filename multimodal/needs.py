"""What pictures may need of a device, from the image processor's limits. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trencadis.core.buckets import WINDOW_SLOTS
from trencadis.core.models.config import read_json
from trencadis.core.planning import Images
from trencadis.multimodal.sizes import FACTOR, PATCH, WINDOW_PATCHES, largest_slots, largest_tokens

MIN_PIXELS, MAX_PIXELS = 3136, 12_845_056
"""Qwen2.5-VL's limits, where a checkpoint names none."""


def pixel_limits(path: Path, asked: Mapping[str, int]) -> tuple[int, int]:
    """(min_pixels, max_pixels): what was asked for, else the checkpoint's."""
    raw = read_json(path / "preprocessor_config.json") or {}
    size = raw.get("size") or {}
    least = asked.get("min_pixels") or raw.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS
    most = asked.get("max_pixels") or raw.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS
    return int(least), int(most)


def factor_of(alignment: str) -> int:
    """Pixels that the sides of a resized picture are multiples of."""
    return WINDOW_PATCHES * PATCH if alignment == "resize" else FACTOR


def needs(path: Path, asked: Mapping[str, int], alignment: str = "pad") -> Images:
    """Slots and tokens of the largest picture, slots of the smallest; with ``resize`` every window is full."""
    least, most = pixel_limits(path, asked)
    factor = factor_of(alignment)
    smallest = -(-least // PATCH**2)
    if alignment == "resize":
        smallest = WINDOW_SLOTS * max(least // factor**2, 1)
    return Images(largest_slots(least, most, factor), smallest, largest_tokens(least, most, factor), factor)
