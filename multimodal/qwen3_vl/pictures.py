"""Qwen3-VL's pictures and videos: Qwen2-VL's processor with patches of 16 pixels, slots cell by cell; times as text.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trencadis.core.checkpoint.model_config import ImageNeeds, ModelConfig
from trencadis.multimodal.qwen2_vl.mrope import GridSpan, Seconds, mrope_positions
from trencadis.multimodal.qwen2_vl.needs import PictureKind, PixelRule, image_needs, image_rule
from trencadis.multimodal.qwen2_vl.preprocessing import BICUBIC, processor_file
from trencadis.multimodal.qwen2_vl.processor import ImageProcessor
from trencadis.multimodal.qwen3_vl.family import PATCH

if TYPE_CHECKING:
    from trencadis.multimodal.deep.config import DeepTower

KIND = PictureKind(windows=False, patch=PATCH, limits=(65_536, 16_777_216))
CLIP = 131_072, 786_432
"""Least and most pixels of all frames of a video whose processor states none."""


def needs(config: ModelConfig, asked: Mapping[str, Any], alignment: str = "pad") -> ImageNeeds:
    """See ``qwen2_vl.needs.image_needs``."""
    return image_needs(config.path, asked, alignment, KIND)


def sizes(config: ModelConfig | None, asked: Mapping[str, Any], alignment: str = "pad") -> PixelRule:
    """What an image becomes by its height and width."""
    return image_rule(config, asked, alignment, KIND)


def processor(config: ModelConfig, kwargs: Mapping[str, Any], alignment: str = "pad") -> ImageProcessor:
    """See ``ImageProcessor.from_checkpoint``; raises StartupError for a video processor that is not implemented."""
    made = ImageProcessor.from_checkpoint(config.path, kwargs, alignment, windows=False, patch=PATCH)
    return replace(made, clip=clip_pixels(config.path))


def clip_pixels(path: Path) -> tuple[int, int]:
    """Least and most pixels of all frames of a video; raises StartupError for other rules than are implemented."""
    found = processor_file(path, "video_processor", "video_preprocessor_config.json")
    if found is None:
        return CLIP
    found.only("video_processor_type", ("Qwen3VLVideoProcessor",), "Qwen3VLVideoProcessor")
    found.only("resample", (BICUBIC,), BICUBIC)
    for key, values in (
        ("fps", (2, 2.0, None)), ("min_frames", (4,)), ("max_frames", (768,)), ("num_frames", (None,)),
        ("do_sample_frames", (True,)), ("do_resize", (True,)), ("cap_pixels_per_frame", (None, False)),
    ):  # fmt: skip
        found.only(key, values, values[0])
    size = found.within("size", {"shortest_edge": CLIP[0], "longest_edge": CLIP[1]})
    if set(size.values) - {"shortest_edge", "longest_edge"}:
        found.refuse("size", "implemented: shortest_edge and longest_edge, which count the pixels of all frames")
    return size.integer("shortest_edge"), size.integer("longest_edge")


def apart_positions(
    length: int, spans: Sequence[GridSpan], tower: DeepTower, seconds: Seconds
) -> tuple[npt.NDArray[np.int32], int]:
    """``mrope_positions`` of spans of one temporal patch each: text between them says the time."""
    return mrope_positions(length, spans, 1.0, tower.merge)
