"""LLaVA-NeXT's image processor: the whole image as one tile, and the tiles of the grid that fits it best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.llava.processor import read_settings
from trencadis.multimodal.llava_next.family import NEWLINE, LlavaNextVisionConfig, Size, read_grid_pinpoints
from trencadis.multimodal.processor_interface import ImageGeometry, Layout, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    cut_squares,
    read_processor_settings,
    shared_processor_fields,
)

PROCESSOR_TYPES = ("LlavaNextImageProcessor", "LlavaNextImageProcessorFast", "LlavaNextImageProcessorPil")


@dataclass(frozen=True)
class LlavaNextImageProcessor(TileImageProcessor):
    """A ``multimodal.processor_interface.Processor`` for an image and its grid of tiles.

    ``grid_pinpoints`` is explained in ``LlavaNextVisionConfig``.
    """

    grid_pinpoints: tuple[Size, ...] = ()
    kind: str = "trencadis.multimodal.llava_next.processor:LlavaNextImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        grid = select_best_resolution((height, width), self.grid_pinpoints)
        kept, layout = self._layout(height, width, grid)
        tokens = sum(piece.tokens for piece in layout if isinstance(piece, PlaceholderRun))
        return self.make_geometry(grid, 1 + len(kept), tokens, layout, 2 * grid[0] * grid[1])

    def _layout(self, height: int, width: int, grid: Size) -> tuple[tuple[int, ...], Layout]:
        side = self.image // self.patch
        whole = (grid[0] // self.image * side, grid[1] // self.image * side)
        return layout_grid(side, whole, count_padding_patches((height, width), whole))

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        base = image.resize((self.image, self.image), Image.Resampling.BICUBIC)
        grid = select_best_resolution((height, width), self.grid_pinpoints)
        rows, columns = fit_into_grid((height, width), grid)
        canvas = Image.new("RGB", (grid[1], grid[0]))
        corner = ((grid[1] - columns) // 2, (grid[0] - rows) // 2)
        canvas.paste(image.resize((columns, rows), Image.Resampling.BICUBIC), corner)
        kept, _ = self._layout(height, width, grid)
        cut = cut_squares(canvas, self.image)
        return [np.asarray(base), *(cut[i] for i in kept)]


def select_best_resolution(size: Size, grids: tuple[Size, ...]) -> Size:
    """Returns the grid in which an image of ``size`` (height, width) keeps most pixels.

    On ties, the one that wastes least.
    """
    height, width = size

    def rank(grid: Size) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    return max(grids, key=rank)


def fit_into_grid(size: Size, grid: Size) -> Size:
    """Returns (height, width) of an image resized to fit into ``grid`` with its aspect ratio kept."""
    height, width = size
    across, down = grid[1] / width, grid[0] / height
    if across < down:
        return min(math.ceil(height * across), grid[0]), grid[1]
    return grid[0], min(math.ceil(width * down), grid[1])


def count_padding_patches(size: Size, whole: Size) -> Size:
    """Counts the padding rows and columns of patches at each edge of a grid of ``whole`` (rows, columns) patches."""
    height, width = size
    rows, columns = whole
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


@lru_cache(maxsize=256)
def layout_grid(side: int, whole: Size, cut: Size) -> tuple[tuple[int, ...], Layout]:
    """Returns the tiles of the grid that have tokens, and the layout: the whole image's tile, then the grid line by
    line.

    Args:
        side: patches along a side of a tile.
        whole: rows and columns of patches in the grid. cut: rows and columns of patches left out at each edge.
    """
    across = whole[1] // side
    rows, columns = range(cut[0], whole[0] - cut[0]), range(cut[1], whole[1] - cut[1])
    shown = range(columns.start // side, -(-columns.stop // side)) or range(1)  # a line's end belongs to some tile
    down = range(rows.start // side, -(-rows.stop // side)) if rows else range(0)
    kept = tuple(r * across + c for r in down for c in shown)
    item = {tile: 1 + i for i, tile in enumerate(kept)}
    layout: list[str | PlaceholderRun] = [PlaceholderRun(0, 0, side * side)]
    for row in rows:
        for c in shown:
            first, last = max(columns.start, c * side), min(columns.stop, (c + 1) * side)
            if first < last:
                at = row % side * side + first - c * side
                layout.append(PlaceholderRun(item[row // side * across + c], at, last - first))
        layout.append(PlaceholderRun(item[row // side * across + shown[-1]], 0, 1, NEWLINE))
    return kept, tuple(layout)


def from_checkpoint(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> LlavaNextImageProcessor:
    """Creates the processor of a checkpoint folder; raises StartupError for unsupported settings."""
    check_processor_kwargs(mm_kwargs)
    v, c = cast(LlavaNextVisionConfig, config.vision), read_processor_settings(config.path)
    normalisation = read_settings(config.path, v.image, PROCESSOR_TYPES)
    if read_grid_pinpoints(c, v.image) != v.grid_pinpoints:
        raise StartupError(f"{c.where}: image_grid_pinpoints are not those of config.json")
    return LlavaNextImageProcessor(**shared_processor_fields(v, normalisation), grid_pinpoints=v.grid_pinpoints)


def image_sizes(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> Callable[..., ImageGeometry]:
    """Returns a function that computes an image's geometry from its height and width."""
    v = cast(LlavaNextVisionConfig, config.vision)
    return LlavaNextImageProcessor(**shared_processor_fields(v), grid_pinpoints=v.grid_pinpoints).compute_geometry
