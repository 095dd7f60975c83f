"""Gemma-3's image processor: a picture is made one square, whatever its sides were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.multimodal.colours import HALF, Colours, read_colours
from trencadis.multimodal.gemma3.config import MeanTower
from trencadis.multimodal.processor import ImageOutline, TakenRows
from trencadis.multimodal.tiles.processor import (
    TileProcessor,
    UInt8,
    check_options,
    settings_file,
    shared_fields,
    tower_of,
)

BILINEAR = 2
KINDS = ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil")
BEGIN, END = "<start_of_image>", "<end_of_image>"


@dataclass(frozen=True)
class SquareProcessor(TileProcessor):
    """``multimodal.processor.Processor`` of pictures of one tile, between two marks."""

    kind: str = "trencadis.multimodal.gemma3.processor:SquareProcessor"

    def outline(self, height: int, width: int) -> ImageOutline:
        side = self.image, self.image
        return self.outlined(side, 1, self.cells, (BEGIN, TakenRows(0, 0, self.cells), END))

    def tiles(self, image: Image.Image, height: int, width: int) -> Sequence[UInt8]:
        return [np.asarray(image.resize((self.image, self.image), Image.Resampling.BILINEAR))]


def read_settings(path: Path, v: MeanTower) -> Colours:
    """The colours of a checkpoint's processor; raises StartupError for a value that is not implemented."""
    c = settings_file(path)
    c.only("image_processor_type", KINDS, KINDS[0])
    c.only("do_resize", (True,), True)
    c.only("do_pan_and_scan", (None, False), None)
    c.only("resample", (BILINEAR,), BILINEAR)
    c.only("image_seq_length", (v.tokens,), v.tokens)
    size = c.within("size", {"height": 224, "width": 224})
    for key in ("height", "width"):
        size.only(key, (v.image,), 224)
    return read_colours(c, HALF)


def from_checkpoint(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> SquareProcessor:
    """The processor of a checkpoint folder; raises StartupError."""
    check_options(asked)
    assert isinstance(config.vision, MeanTower)
    return SquareProcessor(**shared_fields(config.vision, read_settings(config.path, config.vision)))


def image_sizes(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> Callable[..., ImageOutline]:
    """What an image becomes by its height and width."""
    return SquareProcessor(**shared_fields(tower_of(config))).sizes
