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
from trencadis.multimodal.qwen2_vl.geometry import FACTOR, MERGE, PATCH, WINDOW_PATCHES
from trencadis.multimodal.qwen2_vl.preprocessing import read_preprocessing
from trencadis.multimodal.qwen2_vl.sizes import largest_slots, largest_tokens, smart_resize, squares

MIN_PIXELS, MAX_PIXELS = 3136, 12_845_056
"""Qwen2.5-VL's limits, for a checkpoint folder without an image processor."""


class PictureKind(NamedTuple):
    """How a tower cuts pictures: in windows of 8 x 8 patches or not, into patches of so many pixels along a side; and
    the limits of a checkpoint folder without an image processor."""

    windows: bool
    patch: int = PATCH
    limits: tuple[int, int] = (MIN_PIXELS, MAX_PIXELS)

    @property
    def factor(self) -> int:
        """Pixels along a side of a merge cell."""
        return self.patch * MERGE


WINDOWED, WHOLE = PictureKind(True), PictureKind(False)


def pixel_limits(
    path: Path, kwargs: Mapping[str, Any], factor: int = FACTOR, kind: PictureKind = WINDOWED
) -> tuple[int, int]:
    """(min_pixels, max_pixels) from ``--mm-processor-kwargs``, else from the checkpoint.

    Raises:
        StartupError: unknown keys, values that are not implemented, or limits that no image fits.
    """
    asked = server_options(kwargs).pixels
    read = read_preprocessing(path, asked, kind.patch)
    if read is not None:
        least, most = read.min_pixels, read.max_pixels
    else:
        least, most = asked.get("min_pixels", kind.limits[0]), asked.get("max_pixels", kind.limits[1])
    check_pixel_limits(least, most, factor)
    return least, most


def factor_of(alignment: str, kind: PictureKind = WINDOWED) -> int:
    """What the sides of a resized image are multiples of, in pixels; ``alignment`` is ``pad`` or ``resize``."""
    return WINDOW_PATCHES * kind.patch if alignment == "resize" else kind.factor


def image_needs(
    path: Path, asked: Mapping[str, Any], alignment: str = "pad", kind: PictureKind = WINDOWED
) -> ImageNeeds:
    """Slots and tokens of the largest image, slots of the smallest. With alignment ``resize`` every window is full.

    Raises:
        StartupError: see ``pixel_limits``; sizes of VLLM_MULTIMODAL_RESOLUTIONS that no server takes.
    """
    factor, windows, patch = factor_of(alignment, kind), kind.windows, kind.patch
    least, most = pixel_limits(path, asked, factor, kind)
    smallest = -(-least // patch**2)
    if alignment == "resize":
        smallest = WINDOW_SLOTS * max(least // factor**2, 1)
    pictures = tuple(
        (slots_of(grid_of(*_resized(size, factor, least, most), patch), windows), size.fewest, size.most)
        for size in picture_sizes(envs.get("VLLM_MULTIMODAL_RESOLUTIONS", os.environ))
    )
    largest = largest_slots(least, most, factor, patch, windows)
    return ImageNeeds(
        largest, smallest, largest_tokens(least, most, factor, patch), pictures,
        squares=tuple(squares(largest, factor, windows, patch)),
    )  # fmt: skip


class PixelRule(NamedTuple):
    """How a server resizes images: to at least ``least`` and at most ``most`` pixels, sides in multiples of
    ``factor``."""

    least: int
    most: int
    factor: int
    kind: PictureKind = WINDOWED

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing."""
        return smart_resize(height, width, self.factor, self.least, self.most)

    def __call__(self, height: int, width: int) -> ImageOutline:
        """What an image of ``height`` x ``width`` pixels becomes."""
        made = self.resized(height, width)
        grid = grid_of(*made, self.kind.patch)
        return ImageOutline(made, grid, tokens_of(grid), slots_of(grid, self.kind.windows), made[0] * made[1])


def image_rule(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str, kind: PictureKind) -> PixelRule:
    """The rule of a checkpoint, or of one that states no limits."""
    factor = factor_of(alignment, kind)
    least, most = kind.limits if config is None else pixel_limits(config.path, asked, factor, kind)
    return PixelRule(least, most, factor, kind)


def windowed_sizes(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str = "pad") -> PixelRule:
    """Qwen2.5-VL's rule."""
    return image_rule(config, asked, alignment, WINDOWED)


def whole_sizes(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str = "pad") -> PixelRule:
    """Qwen2-VL's rule."""
    return image_rule(config, asked, alignment, WHOLE)


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
    return image_needs(config.path, asked, alignment, WHOLE)
