"""Idefics3's image processor: the longer side to a length, both sides to whole tiles, and the result once more, small.

A picture is resampled twice before it is cut, as transformers does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.multimodal.colours import Colours, read_colours
from trencadis.multimodal.processor import ImageOutline, Layout, TakenRows
from trencadis.multimodal.tiles.processor import (
    TileProcessor,
    UInt8,
    check_options,
    has_settings,
    settings_file,
    shared_fields,
    squares,
    tower_of,
)

KINDS = tuple(f"{name}ImageProcessor{end}" for name in ("Idefics3", "SmolVLM") for end in ("", "Fast", "Pil"))
LANCZOS = 1
LONGEST, MOST_LONGEST = 4 * 364, 4096
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"
GREY = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

Size = tuple[int, int]


@dataclass(frozen=True)
class SplitProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of tiles with names.

    ``longest``: pixels of the longer side; ``split``: whether pictures are cut into tiles.
    """

    longest: int = LONGEST
    split: bool = True
    kind: str = "trencadis.multimodal.idefics3.processor:SplitProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        first = lengthened(height, width, self.longest)
        grid = self._grid(first)
        rows, columns = grid
        count = rows * columns + (rows * columns > 1)
        area = first[0] * first[1] + rows * columns * self.image**2
        resized = (rows * self.image, columns * self.image)
        return self.outlined(resized, count, count * self.cells, named(grid, self.cells), area)

    def _grid(self, size: Size) -> Size:
        """Rows and columns of tiles of a picture whose longer side has its length."""
        if not self.split:
            return 1, 1
        height, width = size
        if width >= height:
            columns = math.ceil(width / self.image)
            return math.ceil(int(columns * self.image / (width / height)) / self.image), columns
        rows = math.ceil(height / self.image)
        return rows, math.ceil(int(rows * self.image * (width / height)) / self.image)

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        first = lengthened(height, width, self.longest)
        rows, columns = self._grid(first)
        for lines, across in (first, (rows * self.image, columns * self.image)):
            image = image.resize((across, lines), Image.Resampling.LANCZOS)
        cut = squares(image, self.image)
        if len(cut) == 1:
            return cut
        return [*cut, np.asarray(image.resize((self.image, self.image), Image.Resampling.LANCZOS))]


def lengthened(height: int, width: int, longest: int) -> Size:
    """(height, width) with the longer side at ``longest`` pixels, the shorter rounded down, then up to an even number.

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


def named(grid: Size, rows: int) -> Layout:
    """Tiles row by row behind their names, then the whole picture; ``rows``: of a tile."""
    if grid == (1, 1):
        return f"{FAKE}{GLOBAL}", TakenRows(0, 0, rows), FAKE
    layout: list[str | TakenRows] = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            before = "\n" if row and not column else ""
            layout.append(f"{before}{FAKE}<row_{row + 1}_col_{column + 1}>")
            layout.append(TakenRows(row * grid[1] + column, 0, rows))
    return *layout, f"\n\n{FAKE}{GLOBAL}", TakenRows(grid[0] * grid[1], 0, rows), FAKE


def _settings(config: ModelConfig) -> dict[str, Any]:
    """The processor's fields; without a file those of the class, for plans."""
    v = tower_of(config)
    if not has_settings(config.path):
        return shared_fields(v, GREY)
    c = settings_file(config.path)
    c.only("image_processor_type", KINDS, KINDS[0])
    c.only("do_resize", (True,), True)
    c.only("resample", (LANCZOS,), LANCZOS)
    c.within("max_image_size", {"longest_edge": 364}).only("longest_edge", (v.image,), 364)
    longest = c.within("size", {"longest_edge": LONGEST}).integer("longest_edge", 2, MOST_LONGEST)
    split = c.boolean("do_image_splitting", True)
    return {**shared_fields(v, read_colours(c, GREY)), "longest": longest, "split": split}


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """Every item is one tile; the arena holds the largest picture's."""
    check_options(asked)
    v, made = tower_of(config), SplitProcessor(**_settings(config))
    side = math.ceil((made.longest + 1) / v.image) if made.split else 1
    return ImageNeeds(v.tile, v.tile, v.tokens * (side * side + (side > 1)), tile=v.tile)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> SplitProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    check_options(asked)
    settings_file(config.path)
    return SplitProcessor(**_settings(config))


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    return SplitProcessor(**_settings(config)).sizes


def colours_of(config: ModelConfig) -> Colours:
    """How a checkpoint's processor makes values of bytes."""
    return read_colours(settings_file(config.path), GREY) if has_settings(config.path) else GREY
