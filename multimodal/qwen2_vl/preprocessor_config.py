"""Reads a checkpoint's image processor settings. Torch-free, no image library.

As in config.json, every key that can change a pixel is used, accepted at the values that are implemented, or refused. A
missing key has transformers' default; a null is not accepted in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trencadis.core.checkpoint.json_fields import JsonFields, read_json
from trencadis.core.json_types import Json, JsonMapping
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP, PixelNormalisation, read_normalisation
from trencadis.multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config import MERGE, PATCH, TEMPORAL

MIN_PIXELS, MAX_PIXELS = 3136, 28 * 28 * 1280
"""Pixel limits of a processor whose settings have none."""

BICUBIC = 3
PROCESSOR_TYPES = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
SUFFIXES = ("", "Fast", "Pil")
NORMALISATION_KEYS = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")
EDGES = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}


class ProcessorRules(NamedTuple):
    """How a family's image processor is named and counts.

    Args:
        types: names of the processor, without suffixes.
        edges: default limits of ``size``.
        frames: the limits of ``size`` count the pixels of that many frames.
        grows_small: images with a side below a cell are enlarged first.
    """

    types: tuple[str, ...] = PROCESSOR_TYPES
    edges: tuple[int, int] = (MIN_PIXELS, MAX_PIXELS)
    frames: int = 1
    grows_small: bool = False


QWEN_RULES = ProcessorRules()


@dataclass(frozen=True)
class PreprocessorConfig:
    """Pixel limits of a resized image, and its pixel normalisation."""

    min_pixels: int
    max_pixels: int
    normalisation: PixelNormalisation = CLIP


def read_preprocessor_config(
    path: Path, mm_kwargs: JsonMapping | None = None, patch: int = PATCH, rules: ProcessorRules = QWEN_RULES
) -> PreprocessorConfig | None:
    """Reads the image processor of a checkpoint folder from processor_config.json, else preprocessor_config.json.

    Args:
        mm_kwargs: the operator's min_pixels and max_pixels, which take precedence.
        patch: pixels along a side of the tower's patches.
        rules: of the family's processor.

    Returns:
        None if there is neither file.

    Raises:
        StartupError: a file cannot be read, or has a value that is not implemented.
    """
    found = read_processor_file(path, "image_processor", "preprocessor_config.json")
    if found is None:
        return None
    kind = found.values.get("image_processor_type", rules.types[0])
    if not isinstance(kind, str) or kind not in {name + suffix for name in rules.types for suffix in SUFFIXES}:
        found.refuse("image_processor_type", f"implemented: {rules.types[0]}")
    found.only("do_resize", (True,), True)
    found.only("resample", (BICUBIC,), BICUBIC)
    normalisation = _read_normalisation(found, CLIP, patch, PATCH)
    _check_video_normalisation(path, normalisation, patch)
    given = JsonFields(mm_kwargs or {}, "--mm-processor-kwargs")
    # min_pixels and max_pixels replace the edges of ``size``; a ``size`` replaces both defaults.
    size = found.within("size", {"shortest_edge": rules.edges[0], "longest_edge": rules.edges[1]})
    if set(size.values) - EDGES:
        found.refuse("size", "implemented: shortest_edge and longest_edge, which count pixels")

    def limit(name: str, edge: str) -> int:
        for place in (given, found) if rules.frames == 1 else (given,):
            if place.is_given(name):
                return place.integer(name)
        whole = size.integer(edge)
        if whole % rules.frames:
            size.refuse(edge, f"it must be a multiple of {rules.frames}, as it counts the pixels of that many frames")
        return whole // rules.frames

    return PreprocessorConfig(limit("min_pixels", "shortest_edge"), limit("max_pixels", "longest_edge"), normalisation)


def read_processor_file(path: Path, part: str, legacy: str) -> JsonFields | None:
    """Returns the settings of one processor: ``part`` of processor_config.json, or the whole file ``legacy``.

    None if both are absent.
    """
    where = path / "processor_config.json"
    whole = read_json(where)
    if whole is not None and whole.get(part) is not None:
        return JsonFields(whole, where).within(part)
    values = read_json(path / legacy)
    return None if values is None else JsonFields(values, path / legacy)


def read_clip_pixels(
    path: Path, kind: str, keys: Sequence[tuple[str, Sequence[Json]]], default: tuple[int, int]
) -> tuple[int, int]:
    """Reads the minimum and maximum pixels of all frames of a video.

    Args:
        kind: type of the family's video processor.
        keys: its own keys, each with the implemented values, the default first.
        default: the limits of a processor without settings.

    Raises:
        StartupError: the file names rules that are not implemented.
    """
    found = read_processor_file(path, "video_processor", "video_preprocessor_config.json")
    if found is None:
        return default
    found.only("video_processor_type", (kind,), kind)
    for key, values in (*keys, ("resample", (BICUBIC,)), ("do_sample_frames", (True,)), ("do_resize", (True,))):
        found.only(key, values, values[0])
    size = found.within("size", {"shortest_edge": default[0], "longest_edge": default[1]})
    if set(size.values) - {"shortest_edge", "longest_edge"}:
        found.refuse("size", "implemented: shortest_edge and longest_edge, which count the pixels of all frames")
    return size.integer("shortest_edge"), size.integer("longest_edge")


def _read_normalisation(c: JsonFields, base: PixelNormalisation, patch: int, default: int) -> PixelNormalisation:
    """Reads the pixel normalisation and checks the patch sizes: a patch's values depend on both."""
    c.only("patch_size", (patch,), default)
    c.only("temporal_patch_size", (TEMPORAL,), TEMPORAL)
    c.only("merge_size", (MERGE,), MERGE)
    return read_normalisation(c, base)


def _check_video_normalisation(path: Path, normalisation: PixelNormalisation, patch: int) -> None:
    """Refuses a video processor whose pixel normalisation differs from the image processor's: the tower holds one."""
    found = read_processor_file(path, "video_processor", "video_preprocessor_config.json")
    if found is not None and _read_normalisation(found, normalisation, patch, patch) != normalisation:
        key = next(k for k in NORMALISATION_KEYS if k in found.values)
        found.refuse(key, "implemented: videos with the pixel normalisation of the image processor")
