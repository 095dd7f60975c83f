"""InternVL3's image processor: the grid of tiles with the nearest aspect ratio, plus the whole image as one tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP, PixelNormalisation, read_normalisation
from trencadis.multimodal.processor_interface import ImageGeometry, Layout
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    cut_squares,
    get_vision_config,
    has_processor_settings,
    layout_tiles,
    make_processor_functions,
    read_processor_settings,
    shared_processor_fields,
)

PROCESSOR_TYPES = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil")
BICUBIC = 3
MAX_TILES = 64
START, END = "<img>", "</img>"
"""Tokens around the rows of an image."""


@dataclass(frozen=True)
class InternVLImageProcessor(TileImageProcessor):
    """A ``multimodal.processor_interface.Processor`` for ``min_patches`` to ``max_patches`` tiles.

    If there are several tiles, one more holds the whole image.
    """

    min_patches: int = 1
    max_patches: int = 12
    kind: str = "trencadis.multimodal.internvl.processor:InternVLImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        columns, rows = choose_tile_grid(height, width, self.image, self.min_patches, self.max_patches)
        count = columns * rows + (columns * rows > 1)
        layout: Layout = (START, *layout_tiles(count, self.rows_per_tile), END)
        return self.make_geometry((rows * self.image, columns * self.image), count, count * self.rows_per_tile, layout)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        columns, rows = choose_tile_grid(height, width, self.image, self.min_patches, self.max_patches)
        resized = image.resize((columns * self.image, rows * self.image), Image.Resampling.BICUBIC)
        cut = cut_squares(resized, self.image)
        if len(cut) == 1:
            return cut
        return [*cut, np.asarray(image.resize((self.image, self.image), Image.Resampling.BICUBIC))]


@lru_cache(maxsize=16)
def _tile_grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Returns (columns, rows) of all grids with ``least`` to ``most`` tiles, the fewest tiles first."""
    numbers = range(1, most + 1)
    return tuple(
        sorted(((c, r) for c in numbers for r in numbers if least <= c * r <= most), key=lambda g: g[0] * g[1])
    )


def choose_tile_grid(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Returns (columns, rows) of the grid whose aspect ratio is nearest to the image's.

    On ties, the larger grid, as long as its area is less than twice the image's.
    """
    best, distance = (1, 1), float("inf")
    for columns, rows in _tile_grids(least, most):
        away = abs(width / height - columns / rows)
        if away < distance or (away == distance and width * height > 0.5 * side * side * columns * rows):
            best, distance = (columns, rows), away
    return best


class _TileSettings(NamedTuple):
    """Settings of the processor: how pixels are normalised, and the minimum and maximum of tiles."""

    normalisation: PixelNormalisation
    least: int
    most: int


def _read_settings(config: ModelConfig) -> _TileSettings:
    """Returns the settings of a checkpoint; without a processor file the class's defaults, for plans."""
    if not has_processor_settings(config.path):
        return _TileSettings(CLIP, 1, 12)
    c = read_processor_settings(config.path)
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    c.only("do_resize", (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    size, image = c.within("size", {"height": 384, "width": 384}), get_vision_config(config).image
    for key in ("height", "width"):
        size.only(key, (image,), 384)
    most = c.integer("max_patches", 1, MAX_TILES, 12)
    return _TileSettings(read_normalisation(c), c.integer("min_patches", 1, most, 1), most)


def _build_processor(config: ModelConfig, mm_kwargs: JsonMapping) -> InternVLImageProcessor:
    check_processor_kwargs(mm_kwargs)
    normalisation, least, most = _read_settings(config)
    return InternVLImageProcessor(
        **shared_processor_fields(get_vision_config(config), normalisation), min_patches=least, max_patches=most
    )


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns the limits of images. Every item is one tile; the arena holds the tiles of the largest image."""
    check_processor_kwargs(mm_kwargs)
    v, most = get_vision_config(config), _read_settings(config).most
    return ImageNeeds(v.slots_per_tile, v.slots_per_tile, v.rows_per_tile * (most + (most > 1)), tile=v.slots_per_tile)


from_checkpoint, image_sizes = make_processor_functions(_build_processor)


def load_normalisation(path: Path) -> PixelNormalisation:
    """Reads how a checkpoint's processor normalises pixels."""
    return read_normalisation(read_processor_settings(path)) if has_processor_settings(path) else CLIP
