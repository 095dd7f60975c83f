"""GLM-4.1V's images: Qwen2-VL's processor with limits that count the pixels of both frames of a patch. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.glm4v.config import EDGES, RULES
from trencadis.multimodal.qwen2_vl.mrope import GridSpan, Seconds, mrope_positions
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.qwen2_vl.smart_resize import PatchScheme, ResizeRule, image_needs, load_resize_rule

if TYPE_CHECKING:
    from trencadis.multimodal.glm4v.config import Glm4vVisionConfig

PATCH_SCHEME = PatchScheme(windows=False, limits=(EDGES[0] // 2, EDGES[1] // 2), rules=RULES)


def load_image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns ``qwen2_vl.smart_resize.image_needs`` for this tower."""
    return image_needs(config.path, mm_kwargs, alignment, PATCH_SCHEME)


def load_image_sizes(config: ModelConfig | None, mm_kwargs: JsonMapping, alignment: str = "pad") -> ResizeRule:
    """Returns the resize rule, which computes an image's geometry from its height and width."""
    return load_resize_rule(config, mm_kwargs, alignment, PATCH_SCHEME)


def load_processor(config: ModelConfig, kwargs: JsonMapping, alignment: str = "pad") -> Qwen2VLImageProcessor:
    """Creates the processor with ``Qwen2VLImageProcessor.from_checkpoint``."""
    return Qwen2VLImageProcessor.from_checkpoint(config.path, kwargs, alignment, windows=False, rules=RULES)


def mrope_positions_of_images(
    length: int, spans: Sequence[GridSpan], tower: Glm4vVisionConfig, seconds: Seconds
) -> tuple[npt.NDArray[np.int32], int]:
    """Computes ``mrope_positions`` for spans of one temporal patch each."""
    return mrope_positions(length, spans, 1.0, tower.merge)
