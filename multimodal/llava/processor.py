"""CLIP's image processor: resizes the shorter side to the image size, and crops the centre."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation, read_normalisation
from trencadis.multimodal.pixtral import processor as pixtral
from trencadis.multimodal.pixtral.config import PixtralVisionConfig
from trencadis.multimodal.processor_interface import ImageGeometry
from trencadis.multimodal.vit import tile_image_processor as tiles
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    get_vision_config,
    read_processor_settings,
    shared_processor_fields,
)

PROCESSOR_TYPES = ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")
BICUBIC = 3


@dataclass(frozen=True)
class ClipImageProcessor(TileImageProcessor):
    """A ``multimodal.processor_interface.Processor`` for images of one tile."""

    kind: str = "trencadis.multimodal.llava.processor:ClipImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        rows, columns = self._resize_shortest_edge(height, width)
        return self.make_geometry((self.image, self.image), 1, self.rows_per_tile, area=rows * columns)

    def _resize_shortest_edge(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) with the shorter side at ``image`` pixels, the longer one rounded down."""
        if width <= height:
            return int(self.image * height / width), self.image
        return self.image, int(self.image * width / height)

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        rows, columns = self._resize_shortest_edge(height, width)
        smooth = image.resize((columns, rows), Image.Resampling.BICUBIC)
        top, left = (rows - self.image) // 2, (columns - self.image) // 2
        return [np.asarray(smooth.crop((left, top, left + self.image, top + self.image)))]


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns the limits of images, depending on the checkpoint's tower."""
    is_pixtral = isinstance(config.vision, PixtralVisionConfig)
    return pixtral.image_needs(config, mm_kwargs) if is_pixtral else tiles.image_needs(config, mm_kwargs)


def from_checkpoint(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> TileImageProcessor:
    """Creates the processor of a checkpoint folder; raises StartupError for unsupported settings."""
    if isinstance(config.vision, PixtralVisionConfig):
        return pixtral.from_checkpoint(config, mm_kwargs)
    check_processor_kwargs(mm_kwargs)
    v = get_vision_config(config)
    return ClipImageProcessor(**shared_processor_fields(v, read_settings(config.path, v.image, PROCESSOR_TYPES)))


def image_sizes(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> Callable[..., ImageGeometry]:
    """Returns a function that computes an image's geometry from its height and width."""
    if isinstance(config.vision, PixtralVisionConfig):
        return pixtral.image_sizes(config, mm_kwargs)
    return ClipImageProcessor(**shared_processor_fields(get_vision_config(config))).compute_geometry


def read_settings(path: Path, image: int, kinds: tuple[str, ...]) -> PixelNormalisation:
    """Reads the pixel normalisation from a checkpoint's processor file; other settings are checked.

    Raises:
        StartupError: there is no file, or a value is not implemented.
    """
    c = read_processor_settings(path)
    c.only("image_processor_type", kinds, kinds[0])
    for key in ("do_resize", "do_center_crop"):
        c.only(key, (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    size = c.within("size", {"shortest_edge": 224})
    size.only("shortest_edge", (image,), 224)
    if set(size.values) - {"shortest_edge"}:
        c.refuse("size", "implemented: shortest_edge alone")
    if isinstance(c.values.get("crop_size"), int):
        c.only("crop_size", (image,))
    else:
        crop = c.within("crop_size", {"height": 224, "width": 224})
        for key in ("height", "width"):
            crop.only(key, (image,), 224)
    return read_normalisation(c)
