"""Qwen3-VL's images and videos: Qwen2-VL's processor with patches of 16 pixels, slots cell by cell; timestamps as text.
Torch-free.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.core.json_types import JsonMapping
from trencadis.multimodal.qwen2_vl.mrope import GridSpan, Seconds, mrope_positions
from trencadis.multimodal.qwen2_vl.preprocessor_config import BICUBIC, read_processor_file
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.qwen2_vl.smart_resize import PatchScheme, ResizeRule, image_needs, load_resize_rule
from trencadis.multimodal.qwen3_vl.family import PATCH

if TYPE_CHECKING:
    from trencadis.multimodal.qwen3_vl.config import DeepStackVisionConfig

PATCH_SCHEME = PatchScheme(windows=False, patch=PATCH, limits=(65_536, 16_777_216))
DEFAULT_CLIP_PIXELS = 131_072, 786_432
"""Default minimum and maximum pixels of all frames of a video."""


def load_image_needs(config: ModelConfig, mm_kwargs: JsonMapping, alignment: str = "pad") -> ImageNeeds:
    """Returns ``qwen2_vl.smart_resize.image_needs`` for this tower."""
    return image_needs(config.path, mm_kwargs, alignment, PATCH_SCHEME)


def load_image_sizes(config: ModelConfig | None, mm_kwargs: JsonMapping, alignment: str = "pad") -> ResizeRule:
    """Returns the resize rule, which computes an image's geometry from its height and width."""
    return load_resize_rule(config, mm_kwargs, alignment, PATCH_SCHEME)


def load_processor(config: ModelConfig, kwargs: JsonMapping, alignment: str = "pad") -> Qwen2VLImageProcessor:
    """Creates the processor with ``Qwen2VLImageProcessor.from_checkpoint``.

    Raises StartupError also for a video processor that is not implemented.
    """
    made = Qwen2VLImageProcessor.from_checkpoint(config.path, kwargs, alignment, windows=False, patch=PATCH)
    return replace(made, clip=read_clip_pixels(config.path))


def read_clip_pixels(path: Path) -> tuple[int, int]:
    """Reads the minimum and maximum pixels of all frames of a video.

    Raises StartupError for rules that are not implemented.
    """
    found = read_processor_file(path, "video_processor", "video_preprocessor_config.json")
    if found is None:
        return DEFAULT_CLIP_PIXELS
    found.only("video_processor_type", ("Qwen3VLVideoProcessor",), "Qwen3VLVideoProcessor")
    found.only("resample", (BICUBIC,), BICUBIC)
    for key, values in (
        ("fps", (2, 2.0, None)), ("min_frames", (4,)), ("max_frames", (768,)), ("num_frames", (None,)),
        ("do_sample_frames", (True,)), ("do_resize", (True,)), ("cap_pixels_per_frame", (None, False)),
    ):  # fmt: skip
        found.only(key, values, values[0])
    size = found.within("size", {"shortest_edge": DEFAULT_CLIP_PIXELS[0], "longest_edge": DEFAULT_CLIP_PIXELS[1]})
    if set(size.values) - {"shortest_edge", "longest_edge"}:
        found.refuse("size", "implemented: shortest_edge and longest_edge, which count the pixels of all frames")
    return size.integer("shortest_edge"), size.integer("longest_edge")


def mrope_positions_with_timestamps(
    length: int, spans: Sequence[GridSpan], tower: DeepStackVisionConfig, seconds: Seconds
) -> tuple[npt.NDArray[np.int32], int]:
    """Computes ``mrope_positions`` for spans of one temporal patch each, with timestamps as text between them."""
    return mrope_positions(length, spans, 1.0, tower.merge)
