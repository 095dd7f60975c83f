"""Idefics3's image processor: scales the longer side to a length, both sides to whole tiles, and adds a small whole
image.

An image is resampled twice before it is cut, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation, read_normalisation
from trencadis.multimodal.processor_interface import ImageGeometry, Layout, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    cut_squares,
    get_vision_config,
    has_processor_settings,
    make_processor_functions,
    read_processor_settings,
    shared_processor_fields,
)

PROCESSOR_TYPES = tuple(f"{name}ImageProcessor{end}" for name in ("Idefics3", "SmolVLM") for end in ("", "Fast", "Pil"))
LANCZOS = 1
DEFAULT_LONGEST_EDGE, MAX_LONGEST_EDGE = 4 * 364, 4096
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"
DEFAULT_NORMALISATION = PixelNormalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

Size = tuple[int, int]


@dataclass(frozen=True)
class Idefics3ImageProcessor(TileImageProcessor):
    """A ``multimodal.processor_interface.Processor`` for tiles with names.

    ``longest``: pixels of the longer side; ``split``: True if images are cut into tiles.
    """

    longest: int = DEFAULT_LONGEST_EDGE
    split: bool = True
    kind: str = "trencadis.multimodal.idefics3.processor:Idefics3ImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        first = resize_longest_edge(height, width, self.longest)
        grid = self._tile_grid(first)
        rows, columns = grid
        count = rows * columns + (rows * columns > 1)
        area = first[0] * first[1] + rows * columns * self.image**2
        resized = (rows * self.image, columns * self.image)
        return self.make_geometry(
            resized, count, count * self.rows_per_tile, layout_named_tiles(grid, self.rows_per_tile), area
        )

    def _tile_grid(self, size: Size) -> Size:
        """Returns rows and columns of tiles for an image whose longer side has been resized."""
        if not self.split:
            return 1, 1
        height, width = size
        if width >= height:
            columns = math.ceil(width / self.image)
            return math.ceil(int(columns * self.image / (width / height)) / self.image), columns
        rows = math.ceil(height / self.image)
        return rows, math.ceil(int(rows * self.image * (width / height)) / self.image)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        first = resize_longest_edge(height, width, self.longest)
        rows, columns = self._tile_grid(first)
        for lines, across in (first, (rows * self.image, columns * self.image)):
            image = image.resize((across, lines), Image.Resampling.LANCZOS)
        cut = cut_squares(image, self.image)
        if len(cut) == 1:
            return cut
        return [*cut, np.asarray(image.resize((self.image, self.image), Image.Resampling.LANCZOS))]


def resize_longest_edge(height: int, width: int, longest: int) -> Size:
    """Returns (height, width) with the longer side at ``longest`` pixels and the shorter side even.

    Both sides stay within 4096.
    """
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    return max(height, 1), max(width, 1)


def layout_named_tiles(grid: Size, rows: int) -> Layout:
    """Returns the layout of the tiles row by row, each after its ``<row_r_col_c>`` text, then of the whole image."""
    if grid == (1, 1):
        return f"{FAKE}{GLOBAL}", PlaceholderRun(0, 0, rows), FAKE
    layout: list[str | PlaceholderRun] = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            before = "\n" if row and not column else ""
            layout.append(f"{before}{FAKE}<row_{row + 1}_col_{column + 1}>")
            layout.append(PlaceholderRun(row * grid[1] + column, 0, rows))
    return *layout, f"\n\n{FAKE}{GLOBAL}", PlaceholderRun(grid[0] * grid[1], 0, rows), FAKE


def _read_settings(config: ModelConfig) -> JsonObject:
    """Returns the processor's fields; without a processor file those of the class, for plans."""
    v = get_vision_config(config)
    if not has_processor_settings(config.path):
        return shared_processor_fields(v, DEFAULT_NORMALISATION)
    c = read_processor_settings(config.path)
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    c.only("do_resize", (True,), True)
    c.only("resample", (LANCZOS,), LANCZOS)
    c.within("max_image_size", {"longest_edge": 364}).only("longest_edge", (v.image,), 364)
    longest = c.within("size", {"longest_edge": DEFAULT_LONGEST_EDGE}).integer("longest_edge", 2, MAX_LONGEST_EDGE)
    split = c.boolean("do_image_splitting", True)
    return {
        **shared_processor_fields(v, read_normalisation(c, DEFAULT_NORMALISATION)),
        "longest": longest,
        "split": split,
    }


def _build_processor(config: ModelConfig, mm_kwargs: JsonMapping) -> Idefics3ImageProcessor:
    check_processor_kwargs(mm_kwargs)
    return Idefics3ImageProcessor(**_read_settings(config))


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns the limits of images. Every item is one tile; the arena holds the tiles of the largest image."""
    v, made = get_vision_config(config), _build_processor(config, mm_kwargs)
    side = math.ceil((made.longest + 1) / v.image) if made.split else 1
    return ImageNeeds(
        v.slots_per_tile, v.slots_per_tile, v.rows_per_tile * (side * side + (side > 1)), tile=v.slots_per_tile
    )


from_checkpoint, image_sizes = make_processor_functions(_build_processor)


def load_normalisation(config: ModelConfig) -> PixelNormalisation:
    """Reads how a checkpoint's processor normalises pixels."""
    return (
        read_normalisation(read_processor_settings(config.path), DEFAULT_NORMALISATION)
        if has_processor_settings(config.path)
        else DEFAULT_NORMALISATION
    )
