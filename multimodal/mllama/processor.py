"""Image processor of Llama-3.2-Vision: picks the arrangement of tiles that scales the image least and pads the
canvas with black on the right and at the bottom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.mllama.config import MllamaVisionConfig, TileGrid, supported_aspect_ratios
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP, PixelNormalisation, read_normalisation
from trencadis.multimodal.processor_interface import ImageGeometry, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    cut_squares,
    has_processor_settings,
    make_processor_functions,
    read_processor_settings,
    shared_processor_fields,
)

PROCESSOR_TYPES = ("MllamaImageProcessor", "MllamaImageProcessorFast", "MllamaImageProcessorPil")
BILINEAR = 2
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class MllamaImageProcessor(TileImageProcessor):
    """``multimodal.processor_interface.Processor`` of images of up to ``max_image_tiles`` tiles.

    All tiles of an image are one encoder item.
    """

    max_image_tiles: int = 4
    kind: str = "trencadis.multimodal.mllama.processor:MllamaImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        rows, columns = self.choose_aspect_ratio(height, width)
        side, tiles = self.image // self.patch, rows * columns
        each = side**2 + 1
        resized = self.fit_to_canvas(height, width)
        area = max(resized[0] * resized[1], tiles * self.image**2)
        grid, layout = (1, rows * side, columns * side), (PlaceholderRun(0, 0, 1, visible_rows=tiles * each),)
        return ImageGeometry(resized, grid, 1, self.slots, area, self.max_image_tiles * each, layout)

    def choose_aspect_ratio(self, height: int, width: int) -> TileGrid:
        """Returns (rows, columns) of tiles: those of the smallest enlargement, or if every arrangement shrinks the
        image, of the smallest reduction; among equals the one with the fewest tiles.
        """
        scales = {
            g: min(g[0] * self.image / height, g[1] * self.image / width)
            for g in supported_aspect_ratios(self.max_image_tiles)
        }
        larger = [scale for scale in scales.values() if scale >= 1]
        best = min(larger) if larger else max(scales.values())
        return min((g for g, scale in scales.items() if scale == best), key=lambda g: g[0] * g[1])

    def fit_to_canvas(self, height: int, width: int) -> TileGrid:
        """Returns (height, width) to which an image is resized: one side fills the canvas, or keeps its length."""
        rows, columns = self.choose_aspect_ratio(height, width)
        tall = min(max(height, self.image), rows * self.image)
        wide = min(max(width, self.image), columns * self.image)
        if wide / width < tall / height:
            return min(floor(height * (wide / width)) or 1, tall), wide
        return tall, min(floor(width * (tall / height)) or 1, wide)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        rows, columns = self.choose_aspect_ratio(height, width)
        tall, wide = self.fit_to_canvas(height, width)
        canvas = Image.new("RGB", (columns * self.image, rows * self.image))
        canvas.paste(image.resize((wide, tall), Image.Resampling.BILINEAR))
        return cut_squares(canvas, self.image)


def _vision_config(config: ModelConfig) -> MllamaVisionConfig:
    assert isinstance(config.vision, MllamaVisionConfig)
    return config.vision


def read_normalisation_settings(config: ModelConfig) -> PixelNormalisation:
    """Reads how a checkpoint's processor normalises pixels; without a processor file returns CLIP's normalisation,
    which suffices for planning.

    Raises:
        StartupError: the file has a value that is not implemented.
    """
    if not has_processor_settings(config.path):
        return CLIP
    v, c = _vision_config(config), read_processor_settings(config.path)
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    for key in ("do_resize", "do_pad"):
        c.only(key, (True,), True)
    c.only("resample", (BILINEAR,), BILINEAR)
    c.only("max_image_tiles", (v.max_num_tiles,), 4)
    size = c.within("size", {"height": 224, "width": 224})
    for key in ("height", "width"):
        size.only(key, (v.image,), 224)
    return read_normalisation(c, PixelNormalisation(HALF, HALF))


def _build_processor(config: ModelConfig, mm_kwargs: JsonMapping) -> MllamaImageProcessor:
    check_processor_kwargs(mm_kwargs)
    v = _vision_config(config)
    return MllamaImageProcessor(
        **shared_processor_fields(v, read_normalisation_settings(config)), max_image_tiles=v.max_num_tiles
    )


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns slots and arena rows of an image: every image takes the slots of all tiles, and as many rows."""
    check_processor_kwargs(mm_kwargs)
    v = _vision_config(config)
    return ImageNeeds(v.slots_per_tile, v.slots_per_tile, v.cross_attention_rows, tile=v.slots_per_tile)


from_checkpoint, image_sizes = make_processor_functions(_build_processor)
