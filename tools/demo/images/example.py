"""The example image that ships beside the checkpoint."""

from __future__ import annotations

from random import Random

from PIL import Image

from demo.images import shapes

SIZE = (336, 224)
THINGS: tuple[tuple[str, tuple[int, int, int], tuple[int, int], int], ...] = (
    ("circle", (230, 30, 30), (64, 112), 40),
    ("square", (40, 70, 220), (168, 112), 40),
    ("triangle", (30, 150, 60), (272, 112), 40),
)


def draw() -> Image.Image:
    """A red circle, a blue square and a green triangle on white, drawn large and shrunk so that edges are smooth."""
    big = 3
    image = Image.new("RGB", (SIZE[0] * big, SIZE[1] * big), (255, 255, 255))
    for shape, colour, (x, y), radius in THINGS:
        points, hole = shapes.outline(shape, Random(0))
        image.paste(colour, mask=shapes.mask(points, hole, x * big, y * big, radius * big, image.size))
    return image.resize(SIZE, Image.Resampling.BICUBIC)
