"""How many vision slots and tokens an image may need, from the image processor's limits. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trencadis.core import envs
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.layout import WINDOW_SLOTS
from trencadis.core.shapes.options import PictureSize, picture_sizes
from trencadis.multimodal.grids import grid_of, slots_of, tokens_of
from trencadis.multimodal.images.limits import check_pixel_limits, server_options
from trencadis.multimodal.processor import ImageOutline
from trencadis.multimodal.qwen2_vl.geometry import FACTOR, PATCH, WINDOW_PATCHES
from trencadis.multimodal.qwen2_vl.preprocessing import read_preprocessing
from trencadis.multimodal.qwen2_vl.sizes import largest_slots, largest_tokens, smart_resize, squares

MIN_PIXELS, MAX_PIXELS = 3136, 12_845_056
"""Qwen2.5-VL's limits, for a checkpoint folder without an image processor."""


def pixel_limits(path: Path, kwargs: Mapping[str, Any], factor: int = FACTOR) -> tuple[int, int]:
    """(min_pixels, max_pixels) from ``--mm-processor-kwargs``, else from the checkpoint.

    Raises:
        StartupError: unknown keys, values that are not implemented, or limits that no image fits.
    """
    asked = server_options(kwargs).pixels
    read = read_preprocessing(path, asked)
    if read is not None:
        least, most = read.min_pixels, read.max_pixels
    else:
        least, most = asked.get("min_pixels", MIN_PIXELS), asked.get("max_pixels", MAX_PIXELS)
    check_pixel_limits(least, most, factor)
    return least, most


def factor_of(alignment: str) -> int:
    """What the sides of a resized image are multiples of, in pixels; ``alignment`` is ``pad`` or ``resize``."""
    return WINDOW_PATCHES * PATCH if alignment == "resize" else FACTOR


def image_needs(path: Path, asked: Mapping[str, Any], alignment: str = "pad", windows: bool = True) -> ImageNeeds:
    """Slots and tokens of the largest image, slots of the smallest. With alignment ``resize`` every window is full.

    Raises:
        StartupError: see ``pixel_limits``; sizes of VLLM_MULTIMODAL_RESOLUTIONS that no server takes.
    """
    factor = factor_of(alignment)
    least, most = pixel_limits(path, asked, factor)
    smallest = -(-least // PATCH**2)
    if alignment == "resize":
        smallest = WINDOW_SLOTS * max(least // factor**2, 1)
    pictures = tuple(
        (slots_of(grid_of(*_resized(size, factor, least, most)), windows), size.fewest, size.most)
        for size in picture_sizes(envs.get("VLLM_MULTIMODAL_RESOLUTIONS", os.environ))
    )
    largest = largest_slots(least, most, factor, windows=windows)
    return ImageNeeds(
        largest, smallest, largest_tokens(least, most, factor), pictures,
        squares=tuple(squares(largest, factor, windows)),
    )  # fmt: skip


class PixelRule(NamedTuple):
    """How a server resizes images: to at least ``least`` and at most ``most`` pixels, sides in multiples of
    ``factor``."""

    least: int
    most: int
    factor: int
    windows: bool = True

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing."""
        return smart_resize(height, width, self.factor, self.least, self.most)

    def __call__(self, height: int, width: int) -> ImageOutline:
        """What an image of ``height`` x ``width`` pixels becomes."""
        made = self.resized(height, width)
        grid = grid_of(*made)
        return ImageOutline(made, grid, tokens_of(grid), slots_of(grid, self.windows), made[0] * made[1])


def _rule(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str, windows: bool) -> PixelRule:
    """The rule of a checkpoint, or of one that states no limits."""
    factor = factor_of(alignment)
    least, most = (MIN_PIXELS, MAX_PIXELS) if config is None else pixel_limits(config.path, asked, factor)
    return PixelRule(least, most, factor, windows)


def windowed_sizes(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str = "pad") -> PixelRule:
    """Qwen2.5-VL's rule."""
    return _rule(config, asked, alignment, windows=True)


def whole_sizes(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str = "pad") -> PixelRule:
    """Qwen2-VL's rule."""
    return _rule(config, asked, alignment, windows=False)


def _resized(size: PictureSize, factor: int, least: int, most: int) -> tuple[int, int]:
    """Height and width of a picture that ``VLLM_MULTIMODAL_RESOLUTIONS`` names, as the server resizes it."""
    try:
        return smart_resize(size.height, size.width, factor, least, most)
    except BadRequest as error:
        raise StartupError(f"VLLM_MULTIMODAL_RESOLUTIONS: {size.width}x{size.height}: {error}") from None


def windowed_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """Qwen2.5-VL's ``image_needs``."""
    return image_needs(config.path, asked, alignment)


def whole_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """``image_needs`` of a tower without windows."""
    return image_needs(config.path, asked, alignment, windows=False)
