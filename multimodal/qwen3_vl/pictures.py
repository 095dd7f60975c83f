"""Qwen3-VL's pictures: Qwen2-VL's processor with patches of 16 pixels, slots cell by cell. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.multimodal.qwen2_vl.mrope import GridSpan, Seconds, mrope_positions
from trencadis.multimodal.qwen2_vl.needs import PictureKind, PixelRule, image_needs, image_rule
from trencadis.multimodal.qwen2_vl.processor import ImageProcessor
from trencadis.multimodal.qwen3_vl.config import PATCH

if TYPE_CHECKING:
    from trencadis.multimodal.qwen3_vl.config import Qwen3Tower

KIND = PictureKind(windows=False, patch=PATCH, limits=(65_536, 16_777_216))


def needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """See ``qwen2_vl.needs.image_needs``."""
    return image_needs(config.path, asked, alignment, KIND)


def sizes(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str = "pad") -> PixelRule:
    """What an image becomes by its height and width."""
    return image_rule(config, asked, alignment, KIND)


def processor(config: ModelConfig, kwargs: Mapping[str, Any], alignment: str = "pad") -> ImageProcessor:
    """See ``ImageProcessor.from_checkpoint``."""
    return ImageProcessor.from_checkpoint(config.path, kwargs, alignment, windows=False, patch=PATCH)


def apart_positions(
    length: int, spans: Sequence[GridSpan], tower: Qwen3Tower, seconds: Seconds
) -> tuple[npt.NDArray[np.int32], int]:
    """``mrope_positions`` of spans of one temporal patch each: text between them says the time."""
    return mrope_positions(length, spans, 1.0, tower.merge)
