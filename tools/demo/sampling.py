"""Draws the grid, images and questions of a training step; they grow harder with progress."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo.images import drawing, layout
from demo.images.scene import MAX_CELLS, MAX_SIDE, RenderedImage
from demo.packing import Batch, Encoder, collate, training_row


@dataclass(frozen=True)
class Mix:
    """How often each sort of image is drawn."""

    shapes: float = 0.72
    number: float = 0.21
    photo: float = 0.07
    pairs: float = 0.09  # steps about two images


def sample_grid(rng: Random, most: int) -> tuple[int, int]:
    """Cells down and across, at most `most` in all."""
    while True:
        area = rng.uniform(5, most * 1.12)
        ratio = 2 ** rng.gauss(0, 0.5)
        h, w = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if min(h, w) >= 2 and max(h, w) <= MAX_SIDE and h * w <= most:
            return h, w


def make_image(grid: tuple[int, int], rng: Random, mix: Mix, most_things: int = 4) -> RenderedImage:
    """One image of any sort."""
    kind = rng.choices(("shapes", "number", "photo"), (mix.shapes, mix.number, mix.photo))[0]
    if kind == "number":
        return drawing.draw_number(grid, rng)
    if kind == "photo":
        return drawing.draw_photo(grid, rng)
    most = min(layout.most_shapes(grid), most_things)
    return drawing.draw_shapes(grid, rng.choices(range(1, most + 1), (22, 32, 24, 22)[:most])[0], rng)


def pair(grid: tuple[int, int], rng: Random) -> list[RenderedImage]:
    """Two images of one shape each, often alike in shape or colour."""
    first = drawing.draw_shapes(grid, 1, rng)
    like = first.scene.things[0] if rng.random() < 0.55 else None
    return [first, drawing.draw_shapes(grid, 1, rng, like)]


def training_batch(rng: Random, encode: Encoder, mix: Mix, progress: float, cost: float) -> Batch:
    """The rows of one step of one process; `cost` scales their number."""
    ramp = min(1.0, progress / 0.25)
    two = rng.random() < mix.pairs
    most = round(16 + (MAX_CELLS - 16) * ramp)
    grid = sample_grid(rng, most // 2 if two else most)
    cells = grid[0] * grid[1] * (2 if two else 1)
    count = max(3, round(cost / (1.7 * cells + 290)))
    things = 2 if ramp < 0.3 else 4
    shown = [pair(grid, rng) if two else [make_image(grid, rng, mix, things)] for _ in range(count)]
    rows = [training_row(p, grid, encode, rng, 230) for p in shown]
    return collate(rows, [p for group in shown for p in group], grid)


def vision_batch(rng: Random, mix: Mix, progress: float, cost: float) -> tuple[tuple[int, int], list[RenderedImage]]:
    """Images without questions, for the first stage."""
    most = round(24 + (MAX_CELLS - 24) * min(1.0, progress / 0.5))
    grid = sample_grid(rng, most)
    return grid, [make_image(grid, rng, mix) for _ in range(max(4, round(cost / (grid[0] * grid[1]))))]
