"""Computes image sizes: the resized height and width, and the tokens and vision slots that an image may need.

A *cell* is ``factor`` x ``factor`` pixels (28: 2 x 2 patches of 14 x 14 pixels) and becomes one token of the decoder.
Limits are those of the checkpoint's image processor. Torch-free.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trencadis.core import envs
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig, SquareImage
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import JsonMapping
from trencadis.core.shapes.bucket_options import PlannedImageSize, parse_image_sizes
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import check_pixel_limits, server_options
from trencadis.multimodal.patch_packing import MAX_ASPECT, check_aspect, count_slots, count_tokens, patch_grid
from trencadis.multimodal.processor_interface import ImageGeometry
from trencadis.multimodal.qwen2_vl.preprocessor_config import QWEN_RULES, ProcessorRules, read_preprocessor_config
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import FACTOR, MERGE, PATCH, WINDOW_PATCHES

MAX_SIDE = 1 << 16
"""Upper bound of an image's side in pixels."""


def smart_resize(
    height: int, width: int, factor: int = FACTOR, min_pixels: int = 3136, max_pixels: int = 12845056
) -> tuple[int, int]:
    """Returns the size to which an image of ``height`` x ``width`` pixels is resized, as the Qwen2-VL processor does.

    Rounds each side to the nearest multiple of ``factor`` (ties to even). If the area then exceeds max_pixels, scales
    the original down to it and rounds the sides down; if it is below min_pixels, scales up and rounds up. No side is 0.

    Returns:
        (height, width) in pixels, positive multiples of ``factor``.

    Raises:
        BadRequest: a side below 1, or an aspect ratio above 200.
    """
    check_aspect(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = math.floor(height / shrink / factor) * factor
        columns = math.floor(width / shrink / factor) * factor
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return max(rows, factor), max(columns, factor)


def enlarge_small(height: int, width: int, factor: int = FACTOR) -> tuple[int, int]:
    """Returns the size of an image whose sides are enlarged in proportion, so that none is below ``factor``."""
    if min(height, width) >= factor:
        return height, width
    grow = max(factor / height, factor / width)
    return int(height * grow), int(width * grow)


def largest_slots(
    min_pixels: int, max_pixels: int, factor: int = FACTOR, patch: int = PATCH, windows: bool = True
) -> int:
    """Returns an upper bound of ``count_slots`` over every image that ``smart_resize`` accepts under these limits.

    Long, thin images need the most: their edge windows are mostly empty.
    """
    side = factor // patch
    return max(count_slots((1, a * side, b * side), windows) for a, b in _longest_sides(min_pixels, max_pixels, factor))


def largest_tokens(
    min_pixels: int, max_pixels: int, factor: int = FACTOR, patch: int = PATCH, merge: int = MERGE
) -> int:
    """Returns an upper bound of ``count_tokens`` over every image that ``smart_resize`` accepts under these limits.

    It is max_pixels in cells, unless min_pixels is close: scaling a thin image up to the minimum rounds its sides up,
    which may exceed the maximum.
    """
    side = factor // patch
    return max(count_tokens((1, a * side, b * side), merge) for a, b in _longest_sides(min_pixels, max_pixels, factor))


def _longest_sides(min_pixels: int, max_pixels: int, factor: int) -> Iterator[tuple[int, int]]:
    """Yields each shorter side with the longest side that it can have, both in cells."""
    least, most = min_pixels / factor**2, max_pixels / factor**2
    for short in range(1, math.isqrt(max(1, math.ceil(max(least, most)))) + 2):
        longest = max(math.floor(most / short), 1)
        if short == 1:
            longest = max(longest, math.floor(math.sqrt(MAX_ASPECT * most)))
        grown = math.sqrt(MAX_ASPECT * least)
        longest = max(longest, math.ceil(min(grown, least / (short - 1)) if short > 1 else grown))
        yield short, min(longest, MAX_ASPECT * (short + 1))


def square_sizes(most: int, step: int, windows: bool = True, patch: int = PATCH) -> Iterator[SquareImage]:
    """Yields the smallest square for each number of slots, up to the first above ``most``.

    Sides are multiples of ``step``.
    """
    slots = 0
    for side in range(step, MAX_SIDE, step):
        patches = (side // patch) ** 2
        now = count_slots((1, side // patch, side // patch), windows)
        if now > slots:
            yield SquareImage(side, patches, now)
        slots = now
        if now > most:
            return


MIN_PIXELS, MAX_PIXELS = 3136, 12_845_056
"""Qwen2.5-VL's limits, for a checkpoint folder without an image processor."""


class PatchScheme(NamedTuple):
    """How a tower cuts images: with or without windows of 8 x 8 patches, patch size in pixels, default pixel limits,
    and the rules of its processor.
    """

    windows: bool
    patch: int = PATCH
    limits: tuple[int, int] = (MIN_PIXELS, MAX_PIXELS)
    rules: ProcessorRules = QWEN_RULES

    @property
    def factor(self) -> int:
        """Pixels along a side of a merge cell."""
        return self.patch * MERGE

    def load_needs(self, config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
        """Returns ``image_needs`` of a checkpoint."""
        return image_needs(config.path, mm_kwargs, alignment, self)

    def load_resize_rule(
        self, config: ModelConfig | None, mm_kwargs: JsonMapping, alignment: str = "pad"
    ) -> ResizeRule:
        """Returns the resize rule of a checkpoint, or of the default limits without a configuration."""
        factor = resize_factor(alignment, self)
        least, most = self.limits if config is None else pixel_limits(config.path, mm_kwargs, factor, self)
        return ResizeRule(least, most, factor, self)


WINDOWED, WHOLE = PatchScheme(True), PatchScheme(False)


def pixel_limits(
    path: Path, kwargs: JsonMapping, factor: int = FACTOR, kind: PatchScheme = WINDOWED
) -> tuple[int, int]:
    """Returns (min_pixels, max_pixels) from ``--mm-processor-kwargs``, else from the checkpoint.

    Raises:
        StartupError: unknown keys, values that are not implemented, or limits that no image can meet.
    """
    mm_kwargs = server_options(kwargs).pixels
    read = read_preprocessor_config(path, mm_kwargs, kind.patch, kind.rules)
    if read is not None:
        least, most = read.min_pixels, read.max_pixels
    else:
        least, most = mm_kwargs.get("min_pixels", kind.limits[0]), mm_kwargs.get("max_pixels", kind.limits[1])
    check_pixel_limits(least, most, factor)
    return least, most


def resize_factor(alignment: str, kind: PatchScheme = WINDOWED) -> int:
    """Returns the number of pixels of which the sides of a resized image are multiples.

    ``alignment`` is ``pad`` or ``resize``.
    """
    return WINDOW_PATCHES * kind.patch if alignment == "resize" else kind.factor


def image_needs(path: Path, mm_kwargs: JsonMapping, alignment: str = "pad", kind: PatchScheme = WINDOWED) -> ImageNeeds:
    """Returns slots and tokens of the largest image and slots of the smallest. With alignment ``resize`` every window
    is full.

    Raises:
        StartupError: see ``pixel_limits``; or sizes in VLLM_MULTIMODAL_RESOLUTIONS with an aspect ratio above 200.
    """
    factor, windows, patch = resize_factor(alignment, kind), kind.windows, kind.patch
    least, most = pixel_limits(path, mm_kwargs, factor, kind)
    smallest = -(-least // patch**2)
    if alignment == "resize":
        smallest = WINDOW_SLOTS * max(least // factor**2, 1)
    listed_sizes = tuple(
        (
            count_slots(patch_grid(*_resize_listed_size(size, factor, least, most), patch), windows),
            size.fewest,
            size.most,
        )
        for size in parse_image_sizes(envs.get("VLLM_MULTIMODAL_RESOLUTIONS", os.environ))
    )
    largest = largest_slots(least, most, factor, patch, windows)
    return ImageNeeds(
        largest, smallest, largest_tokens(least, most, factor, patch), listed_sizes,
        squares=tuple(square_sizes(largest, factor, windows, patch)),
    )  # fmt: skip


class ResizeRule(NamedTuple):
    """Resize rule of a server: at least ``min_pixels`` and at most ``max_pixels`` pixels, sides in multiples of
    ``factor``.
    """

    min_pixels: int
    max_pixels: int
    factor: int
    kind: PatchScheme = WINDOWED

    def resize(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width after resizing."""
        if self.kind.rules.grows_small:
            height, width = enlarge_small(height, width, self.factor)
        return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)

    def __call__(self, height: int, width: int) -> ImageGeometry:
        """Returns the geometry of an image of ``height`` x ``width`` pixels."""
        made = self.resize(height, width)
        grid = patch_grid(*made, self.kind.patch)
        return ImageGeometry(made, grid, count_tokens(grid), count_slots(grid, self.kind.windows), made[0] * made[1])


def _resize_listed_size(size: PlannedImageSize, factor: int, least: int, most: int) -> tuple[int, int]:
    """Returns height and width, after resizing, of an image size listed in ``VLLM_MULTIMODAL_RESOLUTIONS``."""
    try:
        return smart_resize(size.height, size.width, factor, least, most)
    except BadRequest as error:
        raise StartupError(f"VLLM_MULTIMODAL_RESOLUTIONS: {size.width}x{size.height}: {error}") from None
