"""GLM-4.1V's images: Qwen2-VL's processor with limits that count the pixels of both frames of a patch. Videos: each
temporal patch is followed by its time. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.glm4v.config import EDGES, RULES
from trencadis.multimodal.placeholders import expand_with_timestamps
from trencadis.multimodal.processor_interface import PreparedVideo
from trencadis.multimodal.qwen2_vl.preprocessor_config import read_clip_pixels
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.qwen2_vl.smart_resize import PatchScheme

PATCH_SCHEME = PatchScheme(windows=False, limits=(EDGES[0] // 2, EDGES[1] // 2), rules=RULES)


def load_processor(config: ModelConfig, kwargs: JsonMapping, alignment: str = "pad") -> Qwen2VLImageProcessor:
    """Creates the processor with ``Qwen2VLImageProcessor.from_checkpoint``.

    Raises StartupError also for a video processor that is not implemented.
    """
    made = Qwen2VLImageProcessor.from_checkpoint(config.path, kwargs, alignment, windows=False, rules=RULES)
    if config.video_token < 0:
        return made
    name, rule = VIDEOS[config.architecture]
    clip = read_clip_pixels(config.path, f"{name}VideoProcessor", CLIP_VALUES, CLIP_PIXELS)
    return replace(made, clip=clip, clip_rule=rule)


VIDEOS = {
    "Glm4vForConditionalGeneration": ("Glm4v", "seconds"), "Glm46VForConditionalGeneration": ("Glm46V", "dense"),
}  # fmt: skip
"""Architecture -> what its video processor is called, and the rule by which it chooses frames."""

CLIP_PIXELS = 112 * 112, 28 * 28 * 2 * 30000
"""Default minimum and maximum pixels of all frames of a video."""

CLIP_VALUES = (("fps", (2, 2.0)), ("max_duration", (300,)), ("num_frames", (16, None)))
"""Implemented values of the video processor's own keys."""

expand_frames = partial(expand_with_timestamps, behind=True)
"""Expands placeholders; each temporal patch of a video stands like an image, and its time follows."""


def format_whole_seconds(video: PreparedVideo) -> list[str]:
    """Returns the text behind each temporal patch: whole seconds."""
    return [str(int(index / video.rate)) for index in video.indices[::2]]


def format_seconds(video: PreparedVideo) -> list[str]:
    """Returns the text behind each temporal patch: tenths of seconds."""
    return [f"{index / video.rate:.1f} seconds" for index in video.indices[::2]]
