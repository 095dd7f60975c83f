"""Pixtral's image processor: limits the longer side, then rounds up to whole cells; a token ends each row of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor

import numpy as np
from PIL import Image

from trencadis.core.buckets import align_up
from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP, PixelNormalisation, read_normalisation
from trencadis.multimodal.pixtral.config import PixtralVisionConfig
from trencadis.multimodal.processor_interface import ImageGeometry, Layout, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    has_processor_settings,
    make_processor_functions,
    read_processor_settings,
)

PROCESSOR_TYPES = ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil")
BICUBIC = 3
DEFAULT_LONGEST_EDGE, MAX_LONGEST_EDGE = 1024, 8192
BREAK, END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True)
class PixtralImageProcessor(TileImageProcessor):
    """``multimodal.processor_interface.Processor`` of images of any size up to ``image`` pixels along a side."""

    kind: str = "trencadis.multimodal.pixtral.processor:PixtralImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        rows, columns = self._cell_grid(height, width)
        unit, count = self.patch * self.merge, rows * columns
        grid = (1, rows * self.merge, columns * self.merge)
        slots = align_up(count * self.merge**2, WINDOW_SLOTS)
        resized = (rows * unit, columns * unit)
        return ImageGeometry(resized, grid, count, slots, resized[0] * resized[1], count, layout_rows(rows, columns))

    def _cell_grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the number of rows and columns of cells."""
        ratio, unit = max(height / self.image, width / self.image), self.patch * self.merge
        if ratio > 1:
            height, width = max(floor(height / ratio), 1), max(floor(width / ratio), 1)
        return -(-height // unit), -(-width // unit)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        rows, columns = self.compute_tile_geometry(height, width).resized
        return [np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC))]


@lru_cache(maxsize=256)
def layout_rows(rows: int, columns: int) -> Layout:
    """Returns the layout of an image: rows of cells, a break or end token after each."""
    ends = [BREAK] * (rows - 1) + [END]
    return tuple(piece for i, end in enumerate(ends) for piece in (PlaceholderRun(0, i * columns, columns), end))


def _read_settings(config: ModelConfig) -> tuple[PixelNormalisation, int]:
    """Reads the pixel normalisation and the longest side.

    Without a processor file returns the defaults, for planning.
    """
    v = pixtral_config(config)
    if not has_processor_settings(config.path):
        return CLIP, DEFAULT_LONGEST_EDGE
    c = read_processor_settings(config.path)
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    c.only("do_resize", (True,), True)
    c.only("do_center_crop", (False, None), None)
    c.only("resample", (BICUBIC,), BICUBIC)
    least = v.patch * v.merge
    return read_normalisation(c), c.within("size", {"longest_edge": DEFAULT_LONGEST_EDGE}).integer(
        "longest_edge", least, MAX_LONGEST_EDGE
    )


def pixtral_config(config: ModelConfig) -> PixtralVisionConfig:
    """Returns the tower's configuration."""
    assert isinstance(config.vision, PixtralVisionConfig)
    return config.vision


def _build_processor(config: ModelConfig, mm_kwargs: JsonMapping) -> PixtralImageProcessor:
    check_processor_kwargs(mm_kwargs)
    normalisation, longest = _read_settings(config)
    v = pixtral_config(config)
    return PixtralImageProcessor(
        normalisation.mean, normalisation.std, normalisation.rescale, longest, v.patch, v.merge
    )


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns slots and rows of the largest image, a square of the longest side, and slots of the smallest."""
    made = _build_processor(config, mm_kwargs)
    largest = made.compute_tile_geometry(made.image, made.image)
    return ImageNeeds(largest.slots, made.compute_tile_geometry(1, 1).slots, largest.tokens)


from_checkpoint, image_sizes = make_processor_functions(_build_processor)


def load_normalisation(config: ModelConfig) -> PixelNormalisation:
    """Reads how a checkpoint's processor normalises pixels; CLIP's normalisation without a processor file."""
    return read_normalisation(read_processor_settings(config.path)) if has_processor_settings(config.path) else CLIP
