"""Draws the images of ``trencadis check-accuracy``: shapes, numbers and words at known places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30), "green": (40, 160, 60), "blue": (40, 70, 220), "yellow": (245, 220, 40),
    "purple": (140, 40, 170), "orange": (245, 140, 20), "black": (15, 15, 15),
}  # fmt: skip
"""Names of the colours that shapes have, far from each other and from the ground."""

SHAPES = ("circle", "square", "triangle", "star")
GROUND = (238, 238, 238)


class Box(NamedTuple):
    """A box in pixels; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int

    def overlap(self, other: Sequence[float]) -> float:
        """Returns the share of the common area in the area of both boxes together."""
        width = min(self.right, other[2]) - max(self.left, other[0])
        height = min(self.bottom, other[3]) - max(self.top, other[1])
        if width <= 0 or height <= 0:
            return 0.0
        own = (self.right - self.left) * (self.bottom - self.top)
        both = own + (other[2] - other[0]) * (other[3] - other[1]) - width * height
        return width * height / both

    def holds(self, x: float, y: float) -> bool:
        """Returns True if a point lies inside."""
        return self.left <= x < self.right and self.top <= y < self.bottom


@dataclass(frozen=True)
class DrawnShape:
    """A shape that fills a square box."""

    shape: str
    colour: str
    box: Box


@dataclass(frozen=True)
class Scene:
    """An image: its size in pixels, shapes, and a text in its middle."""

    width: int
    height: int
    shapes: tuple[DrawnShape, ...] = ()
    text: str = ""

    def draw(self) -> Image.Image:
        """Returns the image in RGB."""
        image = Image.new("RGB", (self.width, self.height), GROUND)
        pen = ImageDraw.Draw(image)
        for one in self.shapes:
            _draw_shape(pen, one)
        if self.text:
            _draw_text(pen, self)
        return image


def _draw_shape(pen: ImageDraw.ImageDraw, one: DrawnShape) -> None:
    left, top, right, bottom = one.box
    colour, (middle_x, middle_y) = COLOURS[one.colour], ((left + right) / 2, (top + bottom) / 2)
    if one.shape == "circle":
        pen.ellipse((left, top, right - 1, bottom - 1), fill=colour)
    elif one.shape == "square":
        pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)
    elif one.shape == "triangle":
        pen.polygon(((middle_x, top), (right - 1, bottom - 1), (left, bottom - 1)), fill=colour)
    else:
        outer = (right - left) / 2
        points = []
        for i in range(10):
            radius, angle = outer * (0.42 if i % 2 else 1.0), math.pi * (i / 5 - 0.5)
            points.append((middle_x + radius * math.cos(angle), middle_y + radius * math.sin(angle)))
        pen.polygon(points, fill=colour)


def _draw_text(pen: ImageDraw.ImageDraw, scene: Scene) -> None:
    """Draws the text in black, as large as three quarters of the image allow."""
    size = scene.height * 0.6
    font = ImageFont.load_default(size)
    left, _, right, _ = pen.textbbox((0, 0), scene.text, font=font)
    if right - left > 0.75 * scene.width:
        font = ImageFont.load_default(size * 0.75 * scene.width / (right - left))
    pen.text((scene.width / 2, scene.height / 2), scene.text, fill=COLOURS["black"], font=font, anchor="mm")


def place_box(width: int, height: int, column: int, row: int, share: float) -> Box:
    """Returns the box of a shape in a cell of a grid of 3 x 3; ``share``: its side in the shorter side of a cell."""
    cell_width, cell_height = width / 3, height / 3
    side = int(min(cell_width, cell_height) * share)
    left, top = int(cell_width * (column + 0.5) - side / 2), int(cell_height * (row + 0.5) - side / 2)
    return Box(left, top, left + side, top + side)
