"""Patch grids of images: checks the aspect ratio, counts tokens and VISION slots. Pure Python."""

from __future__ import annotations

from trencadis.core.errors import BadRequest
from trencadis.core.shared_constants import WINDOW_SLOTS

Grid = tuple[int, int, int]
"""Number of patches (t, h, w)."""

MAX_ASPECT = 200
"""Largest ratio of the longer side to the shorter."""

PATCH, MERGE, SIDE = 14, 2, 8
"""Default sizes: pixels along a patch, patches along a merge cell and patches along a window."""


def check_aspect(height: int, width: int) -> None:
    """Checks that an image has pixels and an aspect ratio of at most ``MAX_ASPECT``.

    Raises:
        BadRequest: a side below 1 pixel, or the longer side is more than ``MAX_ASPECT`` times the shorter.
    """
    if height < 1 or width < 1:
        raise BadRequest("The image has no pixels.")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadRequest(f"The image's aspect ratio is above {MAX_ASPECT}.")


def patch_grid(height: int, width: int, patch: int = PATCH) -> Grid:
    """Returns the patches (t, h, w) of one image resized to ``height`` x ``width`` pixels."""
    return 1, height // patch, width // patch


def count_tokens(grid: Grid, merge: int = MERGE) -> int:
    """Returns the decoder tokens of a grid: one per ``merge`` x ``merge`` patches."""
    return grid[0] * grid[1] * grid[2] // (merge * merge)


def count_slots(grid: Grid, windows: bool = True) -> int:
    """Returns the VISION slots of a grid (t, h, w): 64 for each window of 8 x 8 patches, even if the edge cuts it.

    Without ``windows``, as many as there are patches, in multiples of 64.
    """
    t, h, w = grid
    if not windows:
        return t * WINDOW_SLOTS * -(-h * w // WINDOW_SLOTS)
    return t * WINDOW_SLOTS * -(-h // SIDE) * -(-w // SIDE)
