"""The eleven colour names, how each may look, and how a pixel is named."""

from __future__ import annotations

import colorsys
from random import Random

import numpy as np
from numpy.typing import NDArray

Rgb = tuple[int, int, int]

COLOURS: tuple[str, ...] = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "gray",
)

# name -> boxes of (hue degrees, saturation, value); a hue range may pass 360
_Box = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
_LOOKS: dict[str, tuple[_Box, ...]] = {
    "red": (((350, 366), (0.8, 1.0), (0.8, 1.0)),),
    "orange": (((24, 39), (0.85, 1.0), (0.92, 1.0)),),
    "yellow": (((50, 60), (0.7, 1.0), (0.9, 1.0)),),
    "green": (((100, 145), (0.6, 1.0), (0.42, 0.8)), ((115, 125), (0.75, 1.0), (0.8, 1.0))),
    "blue": (((212, 240), (0.7, 1.0), (0.5, 1.0)), ((195, 212), (0.5, 0.9), (0.85, 1.0))),
    "purple": (((270, 300), (0.6, 1.0), (0.45, 0.75)),),
    "pink": (((322, 350), (0.25, 0.5), (0.96, 1.0)), ((325, 335), (0.5, 0.65), (0.98, 1.0))),
    "brown": (((15, 29), (0.6, 0.85), (0.36, 0.56)), ((0, 15), (0.65, 0.8), (0.4, 0.6))),
    "black": (((0, 360), (0.0, 0.3), (0.0, 0.12)),),
    "white": (((0, 360), (0.0, 0.03), (0.96, 1.0)),),
    "gray": (((0, 360), (0.0, 0.06), (0.42, 0.68)),),
}


def hsv_to_rgb(hue: float, sat: float, val: float) -> Rgb:
    """Hue in degrees, the others in 0..1, to bytes."""
    r, g, b = colorsys.hsv_to_rgb((hue % 360) / 360, sat, val)
    return round(r * 255), round(g * 255), round(b * 255)


def shade(name: str, rng: Random) -> Rgb:
    """One of the looks of a named colour."""
    h, s, v = rng.choice(_LOOKS[name])
    return hsv_to_rgb(rng.uniform(*h), rng.uniform(*s), rng.uniform(*v))


def distance(a: Rgb, b: Rgb) -> float:
    """Euclidean distance in RGB bytes, green counted a little more."""
    return float(((a[0] - b[0]) ** 2 + 1.4 * (a[1] - b[1]) ** 2 + (a[2] - b[2]) ** 2) ** 0.5)


def contrasting(rng: Random, ground: Rgb, ground_name: str | None, least: float = 95.0) -> tuple[str, Rgb]:
    """A colour name and look that stands out from the ground."""
    while True:
        name = rng.choice(COLOURS)
        if name == ground_name:
            continue
        look = shade(name, rng)
        if distance(look, ground) >= least:
            return name, look


def name_pixels(rgb: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Colour index per pixel of [..., 3] bytes; -1 where no name fits well."""
    x = rgb.astype(np.float32) / 255
    top, low = x.max(-1), x.min(-1)
    span = top - low
    sat = span / np.maximum(top, 1e-6)
    safe = np.maximum(span, 1e-6)
    r, g, b = x[..., 0], x[..., 1], x[..., 2]
    hue = np.where(top == r, (g - b) / safe % 6, np.where(top == g, (b - r) / safe + 2, (r - g) / safe + 4)) * 60
    warm_brown = (top < 0.7) | ((sat < 0.5) & (top < 0.85))
    rules: list[tuple[NDArray[np.bool_], int]] = [
        ((top < 0.17) | ((top < 0.23) & (sat < 0.35)), COLOURS.index("black")),
        ((sat < 0.10) & (top > 0.86), COLOURS.index("white")),
        (sat < 0.12, COLOURS.index("gray")),
        ((hue < 14) & (top < 0.66), COLOURS.index("brown")),
        (((hue < 14) | (hue >= 340)) & (sat < 0.55) & (top > 0.8), COLOURS.index("pink")),
        ((hue < 14) | (hue >= 345), COLOURS.index("red")),
        ((hue < 46) & warm_brown, COLOURS.index("brown")),
        (hue < 44, COLOURS.index("orange")),
        ((hue < 68) & (top > 0.6), COLOURS.index("yellow")),
        ((hue >= 68) & (hue < 165), COLOURS.index("green")),
        ((hue >= 190) & (hue < 255), COLOURS.index("blue")),
        ((hue >= 255) & (hue < 308), COLOURS.index("purple")),
        ((hue >= 308) & (top > 0.75), COLOURS.index("pink")),
    ]
    out = np.full(top.shape, -1, np.int64)
    for mask, index in reversed(rules):
        out[mask] = index
    return out
