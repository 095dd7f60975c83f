"""LFM2-VL's image processor in transformers, which needs torchvision: its one function, a resize, is stood in for.

And what transformers' model takes of an image that our processor has made.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.qwen_vl_utils import InterpolationMode
from trencadis.multimodal.patch_packing import patch_coordinates
from trencadis.multimodal.processor_interface import PreparedImage


def resize(image: torch.Tensor, size: Any, interpolation: Any = None, antialias: bool = True) -> torch.Tensor:
    """uint8 [n, 3, h, w] resized as torchvision does it: by torch, unless the size is the same."""
    if list(image.shape[-2:]) == list(size):
        return image
    return torch.nn.functional.interpolate(image, list(size), mode="bilinear", antialias=antialias)


@cache
def module() -> Any:
    """``transformers.models.lfm2_vl.image_processing_lfm2_vl``."""
    functional = SimpleNamespace(resize=resize, InterpolationMode=InterpolationMode)
    entries: dict[str, dict[str, Any]] = {
        "torchvision": {"__version__": "0.0.0"},
        "torchvision.transforms": {"InterpolationMode": InterpolationMode},
        "torchvision.transforms.v2": {"functional": functional, "InterpolationMode": InterpolationMode},
        "torchvision.transforms.v2.functional": vars(functional),
    }
    placed = [name for name in entries if name not in sys.modules]
    for name in placed:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(entries[name])
    try:
        return import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    finally:
        for name in placed:
            del sys.modules[name]


def split(settings: dict[str, Any], image: np.ndarray[Any, Any]) -> tuple[list[torch.Tensor], int, int, list[int]]:
    """(tiles and thumbnail uint8 [3, h, w], rows, columns, [height, width] of the whole) of an image [h, w, 3]."""
    found = module()
    made = object.__new__(found.Lfm2VlImageProcessor)
    base = found.Lfm2VlImageProcessor.__mro__[1]
    names = (
        "downsample_factor", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens", "max_image_tokens",
        "encoder_patch_size", "tile_size", "max_pixels_tolerance",
    )  # fmt: skip
    given = {name: settings[name] for name in names}
    if not settings["do_image_splitting"]:
        given |= {"min_tiles": 1, "max_tiles": 1}
    patch = pytest.MonkeyPatch()
    patch.setattr(base, "resize", lambda self, x, size, **kw: resize(x, (size.height, size.width)), raising=False)
    try:
        x = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
        images, rows, columns, sizes = made.resize_and_split(x, resample=2, **given)
    finally:
        patch.undo()
    return [one[0] if one.dim() == 4 else one for one in images[0]], rows[0], columns[0], list(sizes[0])


def model_inputs(images: list[PreparedImage], merge: int, patch: int = 16) -> dict[str, torch.Tensor]:
    """``pixel_values``, ``pixel_attention_mask`` and ``spatial_shapes`` of all items of images, padded."""
    items = [item for one in images for item in one.items or (one,)]
    most = max(item.grid[1] * item.grid[2] for item in items)
    values, mask = torch.zeros(len(items), most, 3 * patch * patch), torch.zeros(len(items), most, dtype=torch.int32)
    for i, item in enumerate(items):
        _, h, w = item.grid
        at = patch_coordinates(h, w, merge)
        pixels = torch.from_numpy(item.pixels).view(-1, 3, patch, patch).permute(0, 2, 3, 1).reshape(h * w, -1)
        values[i, at[:, 0] * w + at[:, 1]] = (pixels.float() / 255 - 0.5) / 0.5
        mask[i, : h * w] = 1
    shapes = torch.tensor([item.grid[1:] for item in items])
    return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}
