"""Synthetic images: shapes over a gradient, no two alike, which compress about as photos do."""

from __future__ import annotations

import base64
import io
import random

import numpy as np
from PIL import Image, ImageDraw

SHAPES = 24
QUALITY = 90


def draw_image(height: int, width: int, seed: int) -> Image.Image:
    """Draws the image of a seed."""
    rng = random.Random(seed)
    corners = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    made = Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(made)
    for _ in range(SHAPES):
        x, y = rng.randrange(width), rng.randrange(height)
        right, low = x + rng.randrange(2, max(3, width // 3)), y + rng.randrange(2, max(3, height // 3))
        colour = tuple(rng.randrange(256) for _ in range(3))
        shape = rng.choice((pen.rectangle, pen.ellipse))
        shape((x, y, right, low), fill=colour)
    return made


def make_data_url(height: int, width: int, seed: int) -> str:
    """Returns the image as a JPEG in a data URL."""
    data = io.BytesIO()
    draw_image(height, width, seed).save(data, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
