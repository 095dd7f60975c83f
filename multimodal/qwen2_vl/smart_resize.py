"""Computes image sizes: the resized height and width, and bounds of tokens and vision slots. Pure Python.

A *cell* is ``factor`` x ``factor`` pixels (28: 2 x 2 patches of 14 x 14 pixels) and becomes one token of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trencadis.core.checkpoint.model_config import SquareImage
from trencadis.multimodal.patch_packing import MAX_ASPECT, check_aspect, count_slots, count_tokens
from trencadis.multimodal.qwen2_vl.config import FACTOR, MERGE, PATCH

MAX_SIDE = 1 << 16
"""Upper bound of an image's side in pixels."""


def smart_resize(
    height: int, width: int, factor: int = FACTOR, min_pixels: int = 3136, max_pixels: int = 12845056
) -> tuple[int, int]:
    """Returns the size to which an image of ``height`` x ``width`` pixels is resized, as the Qwen2-VL processor does.

    Rounds each side to the nearest multiple of ``factor`` (ties to even). If the area then exceeds max_pixels, scales
    the original down to it and rounds the sides down; if it is below min_pixels, scales up and rounds up. No side is 0.

    Returns:
        (height, width) in pixels, positive multiples of ``factor``.

    Raises:
        BadRequest: a side below 1, or an aspect ratio above 200.
    """
    check_aspect(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = math.floor(height / shrink / factor) * factor
        columns = math.floor(width / shrink / factor) * factor
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return max(rows, factor), max(columns, factor)


def enlarge_small(height: int, width: int, factor: int = FACTOR) -> tuple[int, int]:
    """Returns the size of an image whose sides are enlarged in proportion, so that none is below ``factor``."""
    if min(height, width) >= factor:
        return height, width
    grow = max(factor / height, factor / width)
    return int(height * grow), int(width * grow)


def largest_slots(
    min_pixels: int, max_pixels: int, factor: int = FACTOR, patch: int = PATCH, windows: bool = True
) -> int:
    """Returns an upper bound of ``count_slots`` over every image that ``smart_resize`` accepts under these limits.

    Long, thin images need the most: their edge windows are mostly empty.
    """
    side = factor // patch
    return max(count_slots((1, a * side, b * side), windows) for a, b in _longest_sides(min_pixels, max_pixels, factor))


def largest_tokens(
    min_pixels: int, max_pixels: int, factor: int = FACTOR, patch: int = PATCH, merge: int = MERGE
) -> int:
    """Returns an upper bound of ``count_tokens`` over every image that ``smart_resize`` accepts under these limits.

    It is max_pixels in cells, unless min_pixels is close: scaling a thin image up to the minimum rounds its sides up,
    which may exceed the maximum.
    """
    side = factor // patch
    return max(count_tokens((1, a * side, b * side), merge) for a, b in _longest_sides(min_pixels, max_pixels, factor))


def _longest_sides(min_pixels: int, max_pixels: int, factor: int) -> Iterator[tuple[int, int]]:
    """Yields each shorter side with the longest side that it can have, both in cells."""
    least, most = min_pixels / factor**2, max_pixels / factor**2
    for short in range(1, math.isqrt(max(1, math.ceil(max(least, most)))) + 2):
        longest = max(math.floor(most / short), 1)
        if short == 1:
            longest = max(longest, math.floor(math.sqrt(MAX_ASPECT * most)))
        grown = math.sqrt(MAX_ASPECT * least)
        longest = max(longest, math.ceil(min(grown, least / (short - 1)) if short > 1 else grown))
        yield short, min(longest, MAX_ASPECT * (short + 1))


def square_sizes(most: int, step: int, windows: bool = True, patch: int = PATCH) -> Iterator[SquareImage]:
    """Yields the smallest square for each number of slots, up to the first above ``most``.

    Sides are multiples of ``step``.
    """
    slots = 0
    for side in range(step, MAX_SIDE, step):
        patches = (side // patch) ** 2
        now = count_slots((1, side // patch, side // patch), windows)
        if now > slots:
            yield SquareImage(side, patches, now)
        slots = now
        if now > most:
            return
