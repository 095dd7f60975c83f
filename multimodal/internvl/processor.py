"""InternVL3's image processor: the grid of tiles whose aspect ratio is nearest, and the whole picture as one more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.multimodal.colours import CLIP, Colours, read_colours
from trencadis.multimodal.processor import ImageOutline, Layout
from trencadis.multimodal.tiles.processor import (
    TileProcessor,
    UInt8,
    check_options,
    has_settings,
    settings_file,
    shared_fields,
    squares,
    tower_of,
    whole_tiles,
)

KINDS = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil")
BICUBIC = 3
MOST_TILES = 64
START, END = "<img>", "</img>"
"""Tokens around the rows of a picture."""


@dataclass(frozen=True)
class InternProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of ``least`` to ``most`` tiles, and one more where there are several."""

    least: int = 1
    most: int = 12
    kind: str = "trencadis.multimodal.internvl.processor:InternProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        columns, rows = grid_of(height, width, self.image, self.least, self.most)
        count = columns * rows + (columns * rows > 1)
        layout: Layout = (START, *whole_tiles(count, self.cells), END)
        return self.outlined((rows * self.image, columns * self.image), count, count * self.cells, layout)

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        columns, rows = grid_of(height, width, self.image, self.least, self.most)
        resized = image.resize((columns * self.image, rows * self.image), Image.Resampling.BICUBIC)
        cut = squares(resized, self.image)
        if len(cut) == 1:
            return cut
        return [*cut, np.asarray(image.resize((self.image, self.image), Image.Resampling.BICUBIC))]


@lru_cache(maxsize=16)
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """(columns, rows) of ``least`` to ``most`` tiles, the fewest first."""
    numbers = range(1, most + 1)
    return tuple(
        sorted(((c, r) for c in numbers for r in numbers if least <= c * r <= most), key=lambda g: g[0] * g[1])
    )


def grid_of(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of the grid whose aspect ratio is nearest to the picture's.

    Of equal ones the larger, while its area is under twice the picture's.
    """
    best, distance = (1, 1), float("inf")
    for columns, rows in _grids(least, most):
        away = abs(width / height - columns / rows)
        if away < distance or (away == distance and width * height > 0.5 * side * side * columns * rows):
            best, distance = (columns, rows), away
    return best


def _settings(config: ModelConfig) -> tuple[Colours, int, int]:
    """Colours, and the fewest and most tiles; without a file the class's defaults, for plans."""
    if not has_settings(config.path):
        return CLIP, 1, 12
    c = settings_file(config.path)
    c.only("image_processor_type", KINDS, KINDS[0])
    c.only("do_resize", (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    size, image = c.within("size", {"height": 384, "width": 384}), tower_of(config).image
    for key in ("height", "width"):
        size.only(key, (image,), 384)
    most = c.integer("max_patches", 1, MOST_TILES, 12)
    return read_colours(c), c.integer("min_patches", 1, most, 1), most


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """Every item is one tile; the arena holds the largest picture's."""
    check_options(asked)
    v, (_, _, most) = tower_of(config), _settings(config)
    return ImageNeeds(v.tile, v.tile, v.tokens * (most + (most > 1)), tile=v.tile)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> InternProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    check_options(asked)
    settings_file(config.path)
    colours, least, most = _settings(config)
    return InternProcessor(**shared_fields(tower_of(config), colours), least=least, most=most)


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    colours, least, most = _settings(config)
    return InternProcessor(**shared_fields(tower_of(config), colours), least=least, most=most).sizes


def colours_of(path: Path) -> Colours:
    """How a checkpoint's processor makes values of bytes."""
    return read_colours(settings_file(path)) if has_settings(path) else CLIP
