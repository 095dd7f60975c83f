"""LLaVA-NeXT's image processor: the whole picture as one tile, and the tiles of the grid that fits it best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.errors import StartupError
from trencadis.multimodal.llava.clip import read_settings
from trencadis.multimodal.llava_next.family import NEWLINE, GridTower, Size, grids_of
from trencadis.multimodal.processor import ImageOutline, Layout, TakenRows
from trencadis.multimodal.tiles.processor import (
    TileProcessor,
    UInt8,
    check_options,
    settings_file,
    shared_fields,
    squares,
)

KINDS = ("LlavaNextImageProcessor", "LlavaNextImageProcessorFast", "LlavaNextImageProcessorPil")


@dataclass(frozen=True)
class GridProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of a picture and its grid; ``grids`` as in ``GridTower``."""

    grids: tuple[Size, ...] = ()
    kind: str = "trencadis.multimodal.llava_next.processor:GridProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        grid = best_grid((height, width), self.grids)
        kept, layout = self._laid_out(height, width, grid)
        tokens = sum(piece.tokens for piece in layout if isinstance(piece, TakenRows))
        return self.outlined(grid, 1 + len(kept), tokens, layout, 2 * grid[0] * grid[1])

    def _laid_out(self, height: int, width: int, grid: Size) -> tuple[tuple[int, ...], Layout]:
        side = self.image // self.patch
        whole = (grid[0] // self.image * side, grid[1] // self.image * side)
        return lines(side, whole, unpadded((height, width), whole))

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        base = image.resize((self.image, self.image), Image.Resampling.BICUBIC)
        grid = best_grid((height, width), self.grids)
        rows, columns = fitted((height, width), grid)
        canvas = Image.new("RGB", (grid[1], grid[0]))
        place = ((grid[1] - columns) // 2, (grid[0] - rows) // 2)
        canvas.paste(image.resize((columns, rows), Image.Resampling.BICUBIC), place)
        kept, _ = self._laid_out(height, width, grid)
        cut = squares(canvas, self.image)
        return [np.asarray(base), *(cut[i] for i in kept)]


def best_grid(size: Size, grids: tuple[Size, ...]) -> Size:
    """The grid in which a picture of ``size`` (height, width) keeps most pixels, then the one that wastes least."""
    height, width = size

    def rank(grid: Size) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    return max(grids, key=rank)


def fitted(size: Size, grid: Size) -> Size:
    """(height, width) of a picture that is resized into ``grid`` as a whole."""
    height, width = size
    across, down = grid[1] / width, grid[0] / height
    if across < down:
        return min(math.ceil(height * across), grid[0]), grid[1]
    return grid[0], min(math.ceil(width * down), grid[1])


def unpadded(size: Size, whole: Size) -> Size:
    """Rows and columns of patches that are left out at each edge, of ``whole`` (rows, columns): they are padding."""
    height, width = size
    rows, columns = whole
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


@lru_cache(maxsize=256)
def lines(side: int, whole: Size, cut: Size) -> tuple[tuple[int, ...], Layout]:
    """Which tiles of the grid have tokens, and the layout: the whole picture's tile, then the grid line by line.

    Args:
        side: patches along a side of a tile.
        whole: rows and columns of patches of the grid; cut: of those that are left out at each edge.
    """
    across = whole[1] // side
    rows, columns = range(cut[0], whole[0] - cut[0]), range(cut[1], whole[1] - cut[1])
    shown = range(columns.start // side, -(-columns.stop // side)) or range(1)  # a line's end belongs to some tile
    down = range(rows.start // side, -(-rows.stop // side)) if rows else range(0)
    kept = tuple(r * across + c for r in down for c in shown)
    item = {tile: 1 + i for i, tile in enumerate(kept)}
    layout: list[str | TakenRows] = [TakenRows(0, 0, side * side)]
    for row in rows:
        for c in shown:
            first, last = max(columns.start, c * side), min(columns.stop, (c + 1) * side)
            if first < last:
                at = row % side * side + first - c * side
                layout.append(TakenRows(item[row // side * across + c], at, last - first))
        layout.append(TakenRows(item[row // side * across + shown[-1]], 0, 1, NEWLINE))
    return kept, tuple(layout)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> GridProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    check_options(asked)
    v, c = cast(GridTower, config.vision), settings_file(config.path)
    colours = read_settings(config.path, v.image, KINDS)
    if grids_of(c, v.image) != v.grids:
        raise StartupError(f"{c.where}: image_grid_pinpoints are not those of config.json")
    return GridProcessor(**shared_fields(v, colours), grids=v.grids)


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    v = cast(GridTower, config.vision)
    return GridProcessor(**shared_fields(v), grids=v.grids).sizes
