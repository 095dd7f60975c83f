"""Places the shapes of an image so that left, right, above and below are unambiguous."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import NamedTuple


class Spot(NamedTuple):
    """A circle that a shape fills, in pixels."""

    x: float
    y: float
    radius: float


def most_shapes(grid: tuple[int, int]) -> int:
    """How many shapes of decent size fit an image of ``grid`` (rows, columns) cells."""
    cells = grid[0] * grid[1]
    return 1 if cells < 10 else 2 if cells < 18 else 3 if cells < 26 else 4


def _single_spot(size: tuple[int, int], rng: Random) -> Spot:
    """A place for a single shape, mostly inside one ninth of the image."""
    width, height = size
    small = min(size)
    cuts = [rng.choice((0, 1, 1, 2)) for _ in range(2)]
    most = 0.46 * small if cuts == [1, 1] else 0.33 * small
    r = max(15.0, rng.uniform(0.15 * small, most))
    place = []
    for cut, side in zip(cuts, (width, height), strict=True):
        low, high = r + 1, side - r - 1
        lo, hi = ((low, 0.33 * side), (0.44 * side, 0.56 * side), (0.67 * side, high))[cut]
        place.append(min(max(rng.uniform(min(lo, hi), max(lo, hi)), low), high))
    return Spot(place[0], place[1], r)


def _apart(spots: list[Spot]) -> bool:
    for i, (x, y, r) in enumerate(spots):
        for u, v, s in spots[:i]:
            if (x - u) ** 2 + (y - v) ** 2 < (1.05 * (r + s) + 7) ** 2:
                return False
    return True


def _fits(kind: str, spots: list[Spot], size: tuple[int, int]) -> bool:
    width, height = size
    if not _apart(spots):
        return False
    if kind in ("side", "stack"):
        (x, y, _), (u, v, _) = spots
        dx, dy = abs(x - u), abs(y - v)
        if kind == "side":
            return dx > 1.35 * dy and dx > 0.2 * width
        return dy > 1.35 * dx and dy > 0.2 * height
    if kind == "row":
        xs = sorted(s[0] for s in spots)
        return all(b - a >= max(14.0, 0.13 * width) for a, b in pairwise(xs))
    return True


def spots(size: tuple[int, int], count: int, rng: Random) -> tuple[str, list[Spot]]:
    """The kind of arrangement (one, side, stack, row or free) and ``count`` places, fewer if so many do not fit."""
    if count == 1:
        return "one", [_single_spot(size, rng)]
    width, height = size
    if count == 2:
        kind = rng.choice(("side", "side", "stack"))
        if width > 1.8 * height:
            kind = "side"
        elif height > 1.8 * width:
            kind = "stack"
    else:
        kind = "row" if width >= 84 and width * 1.6 > height and rng.random() < 0.75 else "free"
    most = min(min(size) / 2 - 1, (width * height / count) ** 0.5 * 0.42)
    for attempt in range(400):
        limit = max(14.0, most * (1 - attempt / 250))
        out: list[Spot] = []
        for _ in range(count):
            r = rng.uniform(max(14.0, 0.55 * limit), limit)
            out.append(Spot(rng.uniform(r + 1, width - r - 1), rng.uniform(r + 1, height - r - 1), r))
        if _fits(kind, out, size):
            return kind, out
    return spots(size, count - 1, rng)
