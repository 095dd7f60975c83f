"""PaliGemma's image processor: an image is made one square, whatever its sides were. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation, read_normalisation
from trencadis.multimodal.processor_interface import ImageGeometry
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    get_vision_config,
    has_processor_settings,
    read_processor_settings,
    shared_processor_fields,
)

BICUBIC = 3
GREY = PixelNormalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
KINDS = ("SiglipImageProcessor", "SiglipImageProcessorFast", "SiglipImageProcessorPil")


@dataclass(frozen=True)
class PaliGemmaProcessor(TileImageProcessor):
    """``multimodal.processor_interface.Processor`` of images of one tile."""

    kind: str = "paligemma_processor:PaliGemmaProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        return self.make_geometry((self.image, self.image), 1, self.rows_per_tile)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        return [np.asarray(image.resize((self.image, self.image), Image.Resampling.BICUBIC))]


def colours_of(config: ModelConfig) -> PixelNormalisation:
    """How bytes become values; raises StartupError for a setting that is not implemented."""
    if not has_processor_settings(config.path):
        return GREY
    v, c = get_vision_config(config), read_processor_settings(config.path)
    c.only("image_processor_type", KINDS, KINDS[0])
    c.only("do_resize", (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    c.only("image_seq_length", (v.rows_per_tile,), v.rows_per_tile)
    size = c.within("size", {"height": 224, "width": 224})
    for key in ("height", "width"):
        size.only(key, (v.image,), 224)
    return read_normalisation(c, GREY)


def from_checkpoint(config: ModelConfig, requested: Mapping[str, Any], alignment: str = "pad") -> PaliGemmaProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    check_processor_kwargs(requested)
    read_processor_settings(config.path)
    return PaliGemmaProcessor(**shared_processor_fields(get_vision_config(config), colours_of(config)))


def image_sizes(
    config: ModelConfig, requested: Mapping[str, Any], alignment: str = "pad"
) -> Callable[..., ImageGeometry]:
    """What an image becomes by its height and width."""
    return PaliGemmaProcessor(**shared_processor_fields(get_vision_config(config))).compute_geometry
