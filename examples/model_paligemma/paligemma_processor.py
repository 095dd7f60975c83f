"""PaliGemma's image processor: a picture is made one square, whatever its sides were. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.colours import Colours, read_colours
from trencadis.multimodal.processor import ImageOutline
from trencadis.multimodal.tiles.processor import (
    TileProcessor,
    UInt8,
    check_options,
    has_settings,
    settings_file,
    shared_fields,
    tower_of,
)

BICUBIC = 3
GREY = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
KINDS = ("SiglipImageProcessor", "SiglipImageProcessorFast", "SiglipImageProcessorPil")


@dataclass(frozen=True)
class PaliGemmaProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of pictures of one tile."""

    kind: str = "paligemma_processor:PaliGemmaProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        return self.outlined((self.image, self.image), 1, self.cells)

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        return [np.asarray(image.resize((self.image, self.image), Image.Resampling.BICUBIC))]


def colours_of(config: ModelConfig) -> Colours:
    """How bytes become values; raises StartupError for a setting that is not implemented."""
    if not has_settings(config.path):
        return GREY
    v, c = tower_of(config), settings_file(config.path)
    c.only("image_processor_type", KINDS, KINDS[0])
    c.only("do_resize", (True,), True)
    c.only("resample", (BICUBIC,), BICUBIC)
    c.only("image_seq_length", (v.tokens,), v.tokens)
    size = c.within("size", {"height": 224, "width": 224})
    for key in ("height", "width"):
        size.only(key, (v.image,), 224)
    return read_colours(c, GREY)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> PaliGemmaProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    check_options(asked)
    settings_file(config.path)
    return PaliGemmaProcessor(**shared_fields(tower_of(config), colours_of(config)))


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    return PaliGemmaProcessor(**shared_fields(tower_of(config))).sizes
