"""Sizes of images: what an image is resized to, its grid of patches, its tokens and its vision slots. Pure Python.

A *cell* is ``factor`` x ``factor`` pixels (28: two by two patches of 14), one token of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trencadis.core.errors import BadRequest
from trencadis.core.layout import FACTOR, MERGE, PATCH, WINDOW_PATCHES, WINDOW_SLOTS

MAX_ASPECT = 200
"""Longer side over shorter side; above it an image is refused."""

Grid = tuple[int, int, int]


def check_aspect(height: int, width: int) -> None:
    """Refuses an empty image and one more than ``MAX_ASPECT`` times as long as wide.

    Raises:
        BadRequest: it is either.
    """
    if height < 1 or width < 1:
        raise BadRequest("The image has no pixels.")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadRequest(f"The image's aspect ratio is above {MAX_ASPECT}.")


def smart_resize(
    height: int, width: int, factor: int = FACTOR, min_pixels: int = 3136, max_pixels: int = 12845056
) -> tuple[int, int]:
    """The size that an image of ``height`` x ``width`` pixels is resized to, equal to the Qwen2-VL processor's.

    Each side is rounded to the nearest multiple of ``factor`` (ties to even); where the area then leaves
    [min_pixels, max_pixels], the original is scaled to that limit and its sides are rounded down (up for the minimum).
    A side is never 0.

    Returns:
        (height, width), positive multiples of ``factor``.

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


def grid_of(height: int, width: int, patch: int = PATCH) -> Grid:
    """Patches (t, h, w) of one image of a resized ``height`` x ``width``."""
    return 1, height // patch, width // patch


def tokens_of(grid: Grid, merge: int = MERGE) -> int:
    """Decoder tokens of a grid: one per ``merge`` x ``merge`` patches."""
    return grid[0] * grid[1] * grid[2] // (merge * merge)


def slots_of(grid: Grid) -> int:
    """VISION slots of a grid: every window of 8 x 8 patches owns 64, also where the edge cuts it."""
    t, h, w = grid
    return t * WINDOW_SLOTS * -(-h // WINDOW_PATCHES) * -(-w // WINDOW_PATCHES)


def largest_slots(min_pixels: int, max_pixels: int, factor: int = FACTOR, patch: int = PATCH) -> int:
    """An upper bound of ``slots_of`` over every image that ``smart_resize`` accepts under these limits.

    Long, thin images need the most: their edge windows are mostly empty.
    """
    side = factor // patch
    return max(slots_of((1, a * side, b * side)) for a, b in _longest(min_pixels, max_pixels, factor))


def largest_tokens(
    min_pixels: int, max_pixels: int, factor: int = FACTOR, patch: int = PATCH, merge: int = MERGE
) -> int:
    """An upper bound of ``tokens_of`` likewise.

    It is max_pixels in cells, unless min_pixels is near it: a thin image that is scaled up to the minimum has its
    sides rounded up, beyond the maximum.
    """
    side = factor // patch
    return max(tokens_of((1, a * side, b * side), merge) for a, b in _longest(min_pixels, max_pixels, factor))


def _longest(min_pixels: int, max_pixels: int, factor: int) -> Iterator[tuple[int, int]]:
    """For each shorter side, in cells, the longest side that goes with it."""
    least, most = min_pixels / factor**2, max_pixels / factor**2
    for short in range(1, math.isqrt(max(1, math.ceil(max(least, most)))) + 2):
        longest = max(math.floor(most / short), 1)
        if short == 1:
            longest = max(longest, math.floor(math.sqrt(MAX_ASPECT * most)))
        grown = math.sqrt(MAX_ASPECT * least)
        longest = max(longest, math.ceil(min(grown, least / (short - 1)) if short > 1 else grown))
        yield short, min(longest, MAX_ASPECT * (short + 1))
