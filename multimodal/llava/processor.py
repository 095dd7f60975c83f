"""CLIP's image processor: the shorter side to the picture's size, and the centre of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.multimodal.lines.config import LineTower
from trencadis.multimodal.llava.clip import read_settings
from trencadis.multimodal.pixtral import processor as pixtral
from trencadis.multimodal.processor import ImageOutline
from trencadis.multimodal.tiles import processor as tiles
from trencadis.multimodal.tiles.processor import TileProcessor, UInt8, check_options, shared_fields, tower_of

KINDS = ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")


@dataclass(frozen=True)
class ClipProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of pictures of one tile."""

    kind: str = "trencadis.multimodal.llava.processor:ClipProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        rows, columns = self._before_crop(height, width)
        return self.outlined((self.image, self.image), 1, self.cells, area=rows * columns)

    def _before_crop(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) with the shorter side at ``image`` pixels, the longer rounded down."""
        if width <= height:
            return int(self.image * height / width), self.image
        return self.image, int(self.image * width / height)

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        rows, columns = self._before_crop(height, width)
        smooth = image.resize((columns, rows), Image.Resampling.BICUBIC)
        top, left = (rows - self.image) // 2, (columns - self.image) // 2
        return [np.asarray(smooth.crop((left, top, left + self.image, top + self.image)))]


def image_needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """What pictures may need, by the tower that the checkpoint has."""
    lines = isinstance(config.vision, LineTower)
    return pixtral.image_needs(config, asked) if lines else tiles.image_needs(config, asked)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> TileProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    if isinstance(config.vision, LineTower):
        return pixtral.from_checkpoint(config, asked)
    check_options(asked)
    v = tower_of(config)
    return ClipProcessor(**shared_fields(v, read_settings(config.path, v.image, KINDS)))


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    if isinstance(config.vision, LineTower):
        return pixtral.image_sizes(config, asked)
    return ClipProcessor(**shared_fields(tower_of(config))).sizes
