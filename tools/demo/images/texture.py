"""Photo-like textures: noise, horizons, leaves and grain in the colours that photographs have."""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo.images.palette import COLOURS, hsv_to_rgb, name_pixels

# ranges of hue, saturation and value, wider and duller than those of the drawn shapes
_DULL: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((350, 368), (0.65, 1.0), (0.55, 0.95)),
    "orange": ((18, 38), (0.7, 1.0), (0.78, 1.0)),
    "yellow": ((46, 62), (0.45, 0.95), (0.75, 1.0)),
    "green": ((75, 155), (0.3, 0.9), (0.28, 0.8)),
    "blue": ((198, 240), (0.3, 0.9), (0.4, 1.0)),
    "purple": ((262, 300), (0.3, 0.8), (0.35, 0.85)),
    "pink": ((320, 350), (0.22, 0.5), (0.86, 1.0)),
    "brown": ((14, 38), (0.35, 0.8), (0.28, 0.62)),
    "black": ((0, 360), (0.0, 0.3), (0.02, 0.14)),
    "white": ((0, 360), (0.0, 0.06), (0.9, 1.0)),
    "gray": ((0, 360), (0.0, 0.1), (0.36, 0.76)),
}


def _noise(size: tuple[int, int], rng: np.random.Generator, coarse: int) -> NDArray[np.float32]:
    """Fractal value noise in 0..1, [height, width]."""
    width, height = size
    total = np.zeros((height, width), np.float32)
    weight, sum_of = 1.0, 0.0
    step = max(6, max(size) // coarse)
    while step >= 3:
        small = rng.random((max(2, height // step + 1), max(2, width // step + 1)), dtype=np.float32)
        total += weight * np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))
        sum_of += weight
        weight *= 0.55
        step //= 2
    total /= sum_of
    low, high = float(total.min()), float(total.max())
    return (total - low) / max(high - low, 1e-6)


def _shades(name: str, rng: Random) -> NDArray[np.float32]:
    """Two looks of one colour, [2, 3]."""
    h, s, v = _DULL[name]
    hue, sat = rng.uniform(*h), rng.uniform(*s)
    values = sorted(rng.uniform(*v) for _ in range(2))
    return np.array([hsv_to_rgb(hue + rng.uniform(-6, 6), sat, value) for value in values], np.float32)


def _layer(name: str, size: tuple[int, int], rng: Random, seeds: np.random.Generator) -> NDArray[np.float32]:
    low, high = _shades(name, rng)
    mix = _noise(size, seeds, rng.choice((2, 4, 8)))
    if rng.random() < 0.25:  # grain or waves
        rows = np.sin(np.linspace(0, rng.uniform(8, 60), size[1], dtype=np.float32))[:, None]
        mix = np.clip(mix * 0.7 + 0.3 * (rows + 1) / 2, 0, 1)
    return np.asarray(low + (high - low) * mix[..., None], np.float32)


def _region(size: tuple[int, int], rng: Random, seeds: np.random.Generator) -> NDArray[np.float32]:
    """Where the second colour lies, 0..1: below or above a horizon, or in patches."""
    width, height = size
    if rng.random() < 0.6:
        line = rng.uniform(0.25, 0.75) * height
        wobble = (_noise((width, 8), seeds, 3)[:1] - 0.5) * height * rng.uniform(0, 0.25)
        rows = np.arange(height, dtype=np.float32)[:, None]
        soft = rng.uniform(1, height * 0.06 + 1.5)
        below = np.clip((rows - line - wobble) / soft + 0.5, 0, 1)
        return below if rng.random() < 0.5 else 1 - below
    cut = rng.uniform(0.35, 0.7)
    return np.clip((_noise(size, seeds, rng.choice((2, 3, 5))) - cut) * rng.uniform(6, 30) + 0.5, 0, 1)


def draw(size: tuple[int, int], rng: Random) -> Image.Image:
    """One texture of one to three colours."""
    seeds = np.random.default_rng(rng.getrandbits(48))
    names = rng.sample(COLOURS, 3)
    if rng.random() < 0.3:
        names = rng.choice(
            (
                ["blue", "green", "white"],
                ["white", "blue", "green"],
                ["green", "brown", "black"],
                ["gray", "brown", "white"],
                ["brown", "green", "gray"],
                ["blue", "brown", "yellow"],
            )
        )
    out = _layer(names[0], size, rng, seeds)
    for name in names[1 : 1 + rng.choice((0, 0, 1, 1, 1, 2))]:
        where = _region(size, rng, seeds)[..., None]
        out = out * (1 - where) + _layer(name, size, rng, seeds) * where
    if rng.random() < 0.5:  # light from one side
        across = np.linspace(rng.uniform(0.8, 1.0), rng.uniform(0.95, 1.1), size[0], dtype=np.float32)[None, :, None]
        out = out * across
    out = out + seeds.normal(0, rng.uniform(0, 9), (size[1], size[0], 1)).astype(np.float32)
    return Image.fromarray(np.clip(out, 0, 255).astype(np.uint8))


def shares(pixels: NDArray[np.uint8]) -> dict[str, float]:
    """Part of the pixels under each colour name, largest first; unnamed pixels count for none."""
    names = name_pixels(pixels[::3, ::3])
    counts = np.bincount(names[names >= 0].ravel(), minlength=len(COLOURS)) / names.size
    order = np.argsort(-counts)
    return {COLOURS[i]: float(counts[i]) for i in order if counts[i] > 0.02}
