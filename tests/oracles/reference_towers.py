"""What transformers makes of random images, for ``tests/vision/family_harness.py``, which drives our tower of
Qwen2.5-VL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.vision.family_harness import FamilyHarness, Shown
from trencadis.multimodal.patch_packing import count_slots
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP_MEAN, CLIP_STD
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import PATCH_VALUES

DEVICES = ("cpu", "padded", "hpu")
LARGEST = 8 * 4096
"""Slots of the largest packing: eight images of 64 x 64 patches."""

Grid = tuple[int, int]


def tower_harness(path: Path, device: str) -> FamilyHarness:
    """The tower of a checkpoint on one device, for packings of up to ``LARGEST`` slots."""
    return FamilyHarness(path, device, LARGEST)


def shown(grid: Grid, pixels: np.ndarray[Any, np.dtype[np.uint8]], want: torch.Tensor) -> Shown:
    """An image of ``grid`` patches (h, w) and its tokens, float32 [tokens, hidden]."""
    return Shown((1, *grid), count_slots((1, *grid)), pixels, want)


def normalised(
    pixels: np.ndarray[Any, np.dtype[np.uint8]], normalisation: tuple[Any, Any] = (CLIP_MEAN, CLIP_STD)
) -> torch.Tensor:
    """float32 [patches, values]: pixel values as the processor of transformers delivers them."""
    mean, std = (torch.tensor(v).repeat_interleave(pixels.shape[1] // 3) for v in normalisation)
    return (torch.from_numpy(pixels).float() / 255 - mean) / std


def encoded(model: Any, pixels: np.ndarray[Any, np.dtype[np.uint8]], grid: Grid) -> torch.Tensor:
    """transformers' image tokens, float32 [h x w / 4, hidden]."""
    with torch.no_grad():
        out: torch.Tensor = model.model.visual(normalised(pixels), grid_thw=torch.tensor([[1, *grid]])).pooler_output
    return out


def make_image(model: Any, grid: Grid, rng: np.random.Generator) -> Shown:
    """A random image of ``grid`` patches (h, w)."""
    pixels = rng.integers(0, 256, (grid[0] * grid[1], PATCH_VALUES), dtype=np.uint8)
    return shown(grid, pixels, encoded(model, pixels, grid))


def random_grid(rng: np.random.Generator, most: int = 64) -> Grid:
    """Even sides of 2 to ``most`` patches."""
    h, w = (2 * int(n) for n in rng.integers(1, most // 2 + 1, 2))
    return h, w
