"""Gemma-4's image processor: the largest size of an image's aspect ratio within 70 to 1,120 tokens of 48 pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonMapping
from trencadis.core.vision_config import WINDOW_SLOTS
from trencadis.multimodal.gemma4.config import MERGE, Gemma4VisionConfig, PatchEmbedConfig
from trencadis.multimodal.pixel_normalisation_and_fixed_point import PixelNormalisation
from trencadis.multimodal.processor_interface import ImageGeometry, PlaceholderRun
from trencadis.multimodal.vit.tile_image_processor import (
    TileImageProcessor,
    UInt8,
    check_processor_kwargs,
    has_processor_settings,
    make_processor_functions,
    read_processor_settings,
)

PROCESSOR_TYPES = tuple(f"Gemma4{kind}ImageProcessor{end}" for kind in ("", "Unified") for end in ("", "Fast", "Pil"))
TOKENS = (70, 140, 280, 560, 1120)
"""Most tokens of an image: what ``max_soft_tokens`` may be."""

DEFAULT_TOKENS = 280
BICUBIC = 3
BEGIN, END = "<|image>", "<image|>"
PIXELS = PixelNormalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
"""The tower takes pixels from -1 to 1."""

UNIT_PIXELS = PixelNormalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 1 / 255)
"""The 12B model takes pixels from 0 to 1."""


@dataclass(frozen=True)
class Gemma4ImageProcessor(TileImageProcessor):
    """``multimodal.processor_interface.Processor`` of images of at most ``tokens`` cells of ``image`` pixels along a
    side.
    """

    tokens: int = DEFAULT_TOKENS
    kind: str = "trencadis.multimodal.gemma4.processor:Gemma4ImageProcessor"

    def compute_tile_geometry(self, height: int, width: int) -> ImageGeometry:
        rows, columns = self._cell_grid(height, width)
        count, each = rows * columns, WINDOW_SLOTS // self.merge**2
        resized = (rows * self.image, columns * self.image)
        layout = (BEGIN, PlaceholderRun(0, 0, count), END)
        slots = -(-count // each) * WINDOW_SLOTS
        area = max(resized[0] * resized[1], height * width)
        return ImageGeometry(resized, (1, rows * self.merge, columns * self.merge), count, slots, area, count, layout)

    def _cell_grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the number of rows and columns of cells, in the reference's own steps."""
        factor = math.sqrt(self.tokens * self.image**2 / (height * width))
        rows, columns = (math.floor(factor * side / self.image) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, self.tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.tokens), 1
        if not 0 < rows * columns <= self.tokens:
            raise BadRequest(f"An image of {width} x {height} pixels fits no size of this model.")
        return rows, columns

    def cut_tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        rows, columns = self.compute_tile_geometry(height, width).resized
        if (columns, rows) != image.size:
            image = image.resize((columns, rows), Image.Resampling.BICUBIC)
        return [np.asarray(image)]


def _read_tokens(config: ModelConfig) -> int:
    """Reads the most tokens of an image; 280 without a processor file, for planning."""
    if not has_processor_settings(config.path):
        return DEFAULT_TOKENS
    c = read_processor_settings(config.path)
    c.only("image_processor_type", PROCESSOR_TYPES, PROCESSOR_TYPES[0])
    c.only("do_resize", (True,), True)
    c.only("do_rescale", (True,), True)
    c.only("do_normalize", (False,), False)
    c.only("resample", (BICUBIC,), BICUBIC)
    c.only("pooling_kernel_size", (MERGE,), MERGE)
    c.only("patch_size", (16,), 16)
    c.only("rescale_factor", (1 / 255,), 1 / 255)
    c.only("max_soft_tokens", TOKENS, DEFAULT_TOKENS)
    text, tokens = config.text, c.integer("max_soft_tokens", default=DEFAULT_TOKENS)
    if text.bidirectional_images and not text.causal_full_layers and 0 < text.window < tokens:
        c.refuse("max_soft_tokens", f"implemented: images within sliding_window, which is {text.window}")
    return tokens


def vision_config(config: ModelConfig) -> Gemma4VisionConfig:
    """Returns the tower's configuration."""
    assert isinstance(config.vision, Gemma4VisionConfig)
    return config.vision


def _build_processor(config: ModelConfig, mm_kwargs: JsonMapping) -> Gemma4ImageProcessor:
    check_processor_kwargs(mm_kwargs)
    v = vision_config(config)
    pixels = UNIT_PIXELS if isinstance(v, PatchEmbedConfig) else PIXELS
    own = {f.name: getattr(pixels, f.name) for f in fields(PixelNormalisation)}
    return Gemma4ImageProcessor(
        **own, image=v.unit, patch=v.patch, merge=v.unit // v.patch, tokens=_read_tokens(config)
    )  # fmt: skip


def image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns slots and rows of the largest image, and slots of the smallest: a line of half as many cells."""
    made = _build_processor(config, mm_kwargs)
    each = WINDOW_SLOTS // made.merge**2
    largest, least = (-(-count // each) * WINDOW_SLOTS for count in (made.tokens, made.tokens // 2))
    return ImageNeeds(largest, least, made.tokens)


from_checkpoint, image_sizes = make_processor_functions(_build_processor)
