"""Pixtral's image processor: sides within a length, then up to whole cells; a token ends each line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import Any

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.layout import WINDOW_SLOTS, aligned
from trencadis.multimodal.colours import CLIP, Colours, read_colours
from trencadis.multimodal.lines.config import LineTower
from trencadis.multimodal.processor import ImageOutline, Layout, TakenRows
from trencadis.multimodal.tiles.processor import TileProcessor, UInt8, check_options, has_settings, settings_file

KINDS = ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil")
BICUBIC = 3
LONGEST, MOST_LONGEST = 1024, 8192
BREAK, END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True)
class LineProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of pictures of any size up to ``image`` pixels along a side."""

    kind: str = "trencadis.multimodal.pixtral.processor:LineProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        rows, columns = self._cells(height, width)
        unit, count = self.patch * self.merge, rows * columns
        grid = (1, rows * self.merge, columns * self.merge)
        slots = aligned(count * self.merge**2, WINDOW_SLOTS)
        resized = (rows * unit, columns * unit)
        return ImageOutline(resized, grid, count, slots, resized[0] * resized[1], count, lines(rows, columns))

    def _cells(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of cells."""
        ratio, unit = max(height / self.image, width / self.image), self.patch * self.merge
        if ratio > 1:
            height, width = max(floor(height / ratio), 1), max(floor(width / ratio), 1)
        return -(-height // unit), -(-width // unit)

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        rows, columns = self.outline(height, width).resized
        return [np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC))]


@lru_cache(maxsize=256)
def lines(rows: int, columns: int) -> Layout:
    """Rows of cells, a token behind each."""
    ends = [BREAK] * (rows - 1) + [END]
    return tuple(piece for i, end in enumerate(ends) for piece in (TakenRows(0, i * columns, columns), end))


def _settings(config: ModelConfig) -> tuple[Colours, int]:
    """Colours, and the longest side; without a file the class's, for plans."""
    v = tower_of(config)
    if not has_settings(config.path):
        return CLIP, LONGEST
    c = settings_file(config.path)
    c.only("image_processor_type", KINDS, KINDS[0])
    c.only("do_resize", (True,), True)
    c.only("do_center_crop", (False, None), None)
    c.only("resample", (BICUBIC,), BICUBIC)
    least = v.patch * v.merge
    return read_colours(c), c.within("size", {"longest_edge": LONGEST}).integer("longest_edge", least, MOST_LONGEST)


def tower_of(config: ModelConfig) -> LineTower:
    """The tower's configuration."""
    assert isinstance(config.vision, LineTower)
    return config.vision


def _made(config: ModelConfig) -> LineProcessor:
    colours, longest = _settings(config)
    v = tower_of(config)
    return LineProcessor(colours.mean, colours.std, colours.rescale, longest, v.patch, v.merge)


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """The largest picture is the square of the longest side."""
    check_options(asked)
    made = _made(config)
    largest = made.outline(made.image, made.image)
    return ImageNeeds(largest.slots, made.outline(1, 1).slots, largest.tokens)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> LineProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    check_options(asked)
    settings_file(config.path)
    return _made(config)


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    return _made(config).sizes


def colours_of(config: ModelConfig) -> Colours:
    """How a checkpoint's processor makes values of bytes."""
    return read_colours(settings_file(config.path)) if has_settings(config.path) else CLIP
