"""Gemma-3's image processor: every image is resized to one square."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.gemma3.family import Gemma3VisionConfig
from trencadis.multimodal.pixel_normalisation_and_fixed_point import (
    IMAGENET_STANDARD,
    PixelNormalisation,
    read_normalisation,
)
from trencadis.multimodal.processor_interface import ImageGeometry, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    get_vision_config,
    read_processor_settings,
    shared_processor_fields,
)

BILINEAR = 2
PROCESSOR_TYPES = ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil")
BEGIN, END = "<start_of_image>", "<end_of_image>"


@dataclass(frozen=True)
class Gemma3ImageProcessor(TileImageProcessor):
    """A ``multimodal.processor_interface.Processor`` for images of one tile, between two marks."""

    kind: str = "trencadis.multimodal.gemma3.processor:Gemma3ImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        side = self.image, self.image
        return self.make_geometry(side, 1, self.rows_per_tile, (BEGIN, PlaceholderRun(0, 0, self.rows_per_tile), END))

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        return [np.asarray(image.resize((self.image, self.image), Image.Resampling.BILINEAR))]


def read_settings(path: Path, v: Gemma3VisionConfig) -> PixelNormalisation:
    """Reads the pixel normalisation of a checkpoint's processor; raises StartupError for unsupported values."""
    c = read_processor_settings(path)
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    c.only("do_resize", (True,), True)
    c.only("do_pan_and_scan", (None, False), None)
    c.only("resample", (BILINEAR,), BILINEAR)
    c.only("image_seq_length", (v.rows_per_tile,), v.rows_per_tile)
    size = c.within("size", {"height": 224, "width": 224})
    for key in ("height", "width"):
        size.only(key, (v.image,), 224)
    return read_normalisation(c, IMAGENET_STANDARD)


def from_checkpoint(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> Gemma3ImageProcessor:
    """Creates the processor of a checkpoint folder; raises StartupError for unsupported settings."""
    check_processor_kwargs(mm_kwargs)
    assert isinstance(config.vision, Gemma3VisionConfig)
    return Gemma3ImageProcessor(**shared_processor_fields(config.vision, read_settings(config.path, config.vision)))


def image_sizes(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> Callable[..., ImageGeometry]:
    """Returns a function that computes an image's geometry from its height and width."""
    return Gemma3ImageProcessor(**shared_processor_fields(get_vision_config(config))).compute_geometry
