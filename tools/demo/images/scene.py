"""What an image shows, apart from its pixels: objects, their places, the ground."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "heart", "cross", "ring", "diamond")
CELL = 28  # pixels of one merged vision token
MAX_CELLS = 64  # 50,176 pixels
MAX_SIDE = 12
ZONES: tuple[str, ...] = (
    "At the top left.",
    "At the top.",
    "At the top right.",
    "At the left.",
    "At the center.",
    "At the right.",
    "At the bottom left.",
    "At the bottom.",
    "At the bottom right.",
)


@dataclass(frozen=True)
class Thing:
    """One drawn shape; places are fractions of the image, the radius is in final pixels."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """Colour and shape, as in `red circle`."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """The truth about one image."""

    kind: str  # "shapes", "number" or "photo"
    things: tuple[Thing, ...] = ()  # sorted from left to right
    layout: str = "free"  # "one", "side", "stack", "row" or "free"
    ground: str | None = None  # a named plain background
    number: str = ""
    number_colour: str = ""
    shares: dict[str, float] = field(default_factory=dict)  # colour name -> part of a photo's pixels


@dataclass(frozen=True)
class RenderedImage:
    """Pixels at a multiple of 28, the truth, and a label for every cell."""

    pixels: NDArray[np.uint8]  # [28 * h, 28 * w, 3]
    scene: Scene
    what: NDArray[np.int64]  # [h * w] 0 ground, 1..8 shapes, 9..18 digits, 19 photo; -1 unclear
    colour: NDArray[np.int64]  # [h * w] colour index; -1 unclear
    centre: NDArray[np.float32]  # [h * w, 2] of the thing in the cell, fractions (x, y); NaN where none


def zone(x: float, y: float) -> str | None:
    """The ninth of the image that a point clearly lies in, as an answer; None near the borders of the ninths."""
    cuts = []
    for v in (x, y):
        if v < 0.34:
            cuts.append(0)
        elif 0.43 < v < 0.57:
            cuts.append(1)
        elif v > 0.66:
            cuts.append(2)
        else:
            return None
    return ZONES[cuts[1] * 3 + cuts[0]]
