"""Qwen3-VL's images and videos: Qwen2-VL's processor with patches of 16 pixels, slots cell by cell; timestamps as text.
Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_clip_pixels
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.qwen2_vl.smart_resize import PatchScheme
from trencadis.multimodal.qwen3_vl.family import PATCH

PATCH_SCHEME = PatchScheme(windows=False, patch=PATCH, limits=(65_536, 16_777_216))
DEFAULT_CLIP_PIXELS = 131_072, 786_432
"""Default minimum and maximum pixels of all frames of a video."""

CLIP_VALUES = (
    ("fps", (2, 2.0, None)), ("min_frames", (4,)), ("max_frames", (768,)), ("num_frames", (None,)),
    ("cap_pixels_per_frame", (None, False)),
)  # fmt: skip
"""Implemented values of the video processor's own keys."""


def load_processor(config: ModelConfig, kwargs: JsonMapping, alignment: str = "pad") -> Qwen2VLImageProcessor:
    """Creates the processor with ``Qwen2VLImageProcessor.from_checkpoint``.

    Raises StartupError also for a video processor that is not implemented.
    """
    made = Qwen2VLImageProcessor.from_checkpoint(config.path, kwargs, alignment, windows=False, patch=PATCH)
    return replace(made, clip=read_clip_pixels(config.path, "Qwen3VLVideoProcessor", CLIP_VALUES, DEFAULT_CLIP_PIXELS))
