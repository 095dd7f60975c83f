"""Llama-3.2-Vision's image processor: the arrangement of tiles that scales a picture least, black beside and below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.multimodal.colours import CLIP, Colours, read_colours
from trencadis.multimodal.processor import ImageOutline, TakenRows
from trencadis.multimodal.stacks.config import Grid, TwoStackTower, grids
from trencadis.multimodal.tiles.processor import (
    TileProcessor,
    UInt8,
    check_options,
    has_settings,
    settings_file,
    shared_fields,
    squares,
)

KINDS = ("MllamaImageProcessor", "MllamaImageProcessorFast", "MllamaImageProcessorPil")
BILINEAR = 2
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class CanvasProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of pictures of up to ``most`` tiles, which are one item."""

    most: int = 4
    kind: str = "trencadis.multimodal.mllama.processor:CanvasProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        rows, columns = self.grid_of(height, width)
        side, tiles = self.image // self.patch, rows * columns
        each = side**2 + 1
        resized = self.fitted(height, width)
        area = max(resized[0] * resized[1], tiles * self.image**2)
        grid, layout = (1, rows * side, columns * side), (TakenRows(0, 0, 1, shown=tiles * each),)
        return ImageOutline(resized, grid, 1, self.slots, area, self.most * each, layout)

    def grid_of(self, height: int, width: int) -> Grid:
        """(rows, columns): the least enlargement, else the least reduction; of equal ones the fewest tiles."""
        scales = {g: min(g[0] * self.image / height, g[1] * self.image / width) for g in grids(self.most)}
        larger = [scale for scale in scales.values() if scale >= 1]
        best = min(larger) if larger else max(scales.values())
        return min((g for g, scale in scales.items() if scale == best), key=lambda g: g[0] * g[1])

    def fitted(self, height: int, width: int) -> Grid:
        """(height, width) to which a picture is resized: one side fills the canvas, or keeps its length."""
        rows, columns = self.grid_of(height, width)
        tall = min(max(height, self.image), rows * self.image)
        wide = min(max(width, self.image), columns * self.image)
        if wide / width < tall / height:
            return min(floor(height * (wide / width)) or 1, tall), wide
        return tall, min(floor(width * (tall / height)) or 1, wide)

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        rows, columns = self.grid_of(height, width)
        tall, wide = self.fitted(height, width)
        canvas = Image.new("RGB", (columns * self.image, rows * self.image))
        canvas.paste(image.resize((wide, tall), Image.Resampling.BILINEAR))
        return squares(canvas, self.image)


def _tower(config: ModelConfig) -> TwoStackTower:
    assert isinstance(config.vision, TwoStackTower)
    return config.vision


def settings(config: ModelConfig) -> Colours:
    """The colours of a checkpoint's processor, or without a file CLIP's, for plans.

    Raises:
        StartupError: a value that is not implemented.
    """
    if not has_settings(config.path):
        return CLIP
    v, c = _tower(config), settings_file(config.path)
    c.only("image_processor_type", KINDS, KINDS[0])
    for key in ("do_resize", "do_pad"):
        c.only(key, (True,), True)
    c.only("resample", (BILINEAR,), BILINEAR)
    c.only("max_image_tiles", (v.tiles,), 4)
    size = c.within("size", {"height": 224, "width": 224})
    for key in ("height", "width"):
        size.only(key, (v.image,), 224)
    return read_colours(c, Colours(HALF, HALF))


def _made(config: ModelConfig, asked: Mapping[str, Any]) -> CanvasProcessor:
    check_options(asked)
    v = _tower(config)
    return CanvasProcessor(**shared_fields(v, settings(config)), most=v.tiles)


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """Every picture takes all tiles; the arena holds as many rows of each."""
    check_options(asked)
    v = _tower(config)
    return ImageNeeds(v.tile, v.tile, v.unit, tile=v.tile)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> CanvasProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    settings_file(config.path)
    return _made(config, asked)


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    return _made(config, asked).sizes
