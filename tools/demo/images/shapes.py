"""Outlines of the eight shapes inside the unit circle, and their masks."""

from __future__ import annotations

import math
from random import Random

from PIL import Image, ImageDraw

from demo.images.scene import SHAPES

Points = list[tuple[float, float]]


def _regular(corners: int, radius: float = 1.0, turn: float = 0.0) -> Points:
    return [
        (radius * math.sin(turn + 2 * math.pi * i / corners), -radius * math.cos(turn + 2 * math.pi * i / corners))
        for i in range(corners)
    ]


def _star(inner: float) -> Points:
    outer, dents = _regular(5), _regular(5, inner, math.pi / 5)
    return [p for pair in zip(outer, dents, strict=True) for p in pair]


def _heart() -> Points:
    points = []
    for i in range(40):
        t = 2 * math.pi * i / 40
        x = 16 * math.sin(t) ** 3
        y = -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))
        points.append((x / 17, y / 17 - 0.05))
    return points


def _cross(arm: float) -> Points:
    a, b = arm, 0.95
    return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]


def outline(shape: str, rng: Random) -> tuple[Points, Points]:
    """Outer points and the points of a hole (empty where there is none), in the unit circle."""
    hole: Points = []
    if shape == "circle":
        points = _regular(48)
    elif shape == "ring":
        points, hole = _regular(48), _regular(40, rng.uniform(0.45, 0.68))
    elif shape == "square":
        points = _regular(4, 1.0, math.pi / 4)
    elif shape == "triangle":
        points = _regular(3)
        points = [(x, y + 0.12) for x, y in points]
    elif shape == "diamond":
        wide = rng.uniform(0.55, 0.72)
        points = [(0, -1), (wide, 0), (0, 1), (-wide, 0)]
    elif shape == "star":
        points = _star(rng.uniform(0.38, 0.5))
    elif shape == "heart":
        points = _heart()
    elif shape == "cross":
        points = _cross(rng.uniform(0.24, 0.38))
    else:
        raise ValueError(f"no such shape: {shape} (known: {', '.join(SHAPES)})")
    turn = math.radians(rng.uniform(-8, 8)) if rng.random() < 0.4 else 0.0
    c, s = math.cos(turn), math.sin(turn)
    return [(c * x - s * y, s * x + c * y) for x, y in points], hole


def mask(points: Points, hole: Points, x: float, y: float, radius: float, size: tuple[int, int]) -> Image.Image:
    """A mask of the whole image (bytes 0 or 255) with the outline filled."""
    out = Image.new("L", size)
    draw = ImageDraw.Draw(out)
    draw.polygon([(x + radius * px, y + radius * py) for px, py in points], fill=255)
    if hole:
        draw.polygon([(x + radius * px, y + radius * py) for px, py in hole], fill=0)
    return out
