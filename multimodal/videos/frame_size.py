"""Computes the size of a video's frames as the model sees them: qwen-vl-utils' rules (0.0.14), or those of the model's
own video processor in transformers.

Limits apply to all frames together, so that a short clip keeps larger frames. A request's options have their usual
meaning: min_pixels and max_pixels limit a frame, total_pixels all frames.
"""

from __future__ import annotations

import math

from trencadis.core.errors import BadRequest, TooLarge
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import CLIP_TOKENS, NO_OPTIONS, MediaOptions
from trencadis.multimodal.patch_packing import check_aspect
from trencadis.multimodal.videos.frame_sampling import FRAMES_PER_PATCH, FrameLimits, FrameSampling

IMAGE_TOKENS = (4, 16384)
"""Minimum and maximum tokens of a frame of a list, before all frames are resized to one size."""
TOTAL_PIXELS_SHARE = 0.9
"""Default bound of a video's pixels: 0.9 x ``CLIP_TOKENS`` cells."""


def frame_size(
    height: int, width: int, frames: int, limits: FrameLimits, options: MediaOptions = NO_OPTIONS
) -> tuple[int, int]:
    """Returns (height, width) in pixels to which every frame of a video is resized.

    Args:
        height: height of the video's frames in pixels; likewise ``width``.
        frames: number of sampled frames, the repeated one included.

    Raises:
        BadRequest: an aspect ratio above 200, or limits that contradict each other or the server's.
        TooLarge: more than the server planned for.
    """
    check_aspect(height, width)
    if options.resized_height is not None and options.resized_width is not None:
        height, width = options.resized_height, options.resized_width
        check_aspect(height, width)
        size = fit_pixels(height, width, limits.factor, *(tokens * limits.cell**2 for tokens in IMAGE_TOKENS))
    else:
        size = fit_pixels(height, width, limits.factor, *pixel_range(frames, limits, options))
    if not limits.fits(limits.grid(size)):
        raise TooLarge(f"Frames of {size[1]}x{size[0]} pixels exceed this server's limit of {limits.most}.")
    return size


def pixel_range(frames: int, limits: FrameLimits, options: MediaOptions) -> tuple[int, float]:
    """Returns the minimum and maximum pixels of each of ``frames`` frames.

    Raises:
        BadRequest: min_pixels above max_pixels or above the server's limit.
    """
    least, most = limits.defaults
    if options.min_pixels is not None:
        least = options.min_pixels
        if least > limits.most:
            raise BadRequest(f"min_pixels={least} is above this server's limit of {limits.most}.")
    total = TOTAL_PIXELS_SHARE * CLIP_TOKENS * limits.cell**2 if options.total_pixels is None else options.total_pixels
    bound: float = max(min(most, total / frames * FRAMES_PER_PATCH), min(int(least * 1.05), limits.most))
    if options.max_pixels is not None:
        bound = min(options.max_pixels, bound)
    if least > bound:
        if options.min_pixels is not None:
            raise BadRequest(f"min_pixels={least} is above max_pixels={bound:.0f}.")
        least = int(bound)
    return least, bound


def list_frame_size(
    height: int, width: int, limits: FrameLimits, options: MediaOptions = NO_OPTIONS
) -> tuple[int, int]:
    """Returns (height, width) to which a frame of a list is resized before ``frame_size`` is applied.

    qwen-vl-utils first treats each frame of a list as a separate image, whose sides are multiples of two cells.

    Raises:
        BadRequest: an aspect ratio above 200, or min_pixels above max_pixels.
    """
    check_aspect(height, width)
    factor = 2 * limits.cell
    least, most = (tokens * factor**2 for tokens in IMAGE_TOKENS)
    if options.resized_height is not None and options.resized_width is not None:
        check_aspect(options.resized_height, options.resized_width)
        return fit_pixels(options.resized_height, options.resized_width, factor, least, most)
    most = most if options.max_pixels is None else options.max_pixels
    least = min(least, most) if options.min_pixels is None else options.min_pixels
    if least > most:
        raise BadRequest(f"min_pixels={least} is above max_pixels={most}.")
    return fit_pixels(height, width, factor, least, most)


def fit_pixels(height: int, width: int, factor: int, least: float, most: float) -> tuple[int, int]:
    """Computes qwen-vl-utils' ``smart_resize``: unlike that of images it raises sides to ``factor`` before
    it checks the area.

    All in pixels; returns (height, width).
    """
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > most:
        shrink = math.sqrt((height * width) / most)
        rows, columns = (math.floor(side / shrink / factor) * factor for side in (height, width))
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return max(rows, factor), max(columns, factor)


def clip_frame_size(
    height: int, width: int, chosen: FrameSampling, limits: FrameLimits, options: MediaOptions = NO_OPTIONS
) -> tuple[int, int]:
    """Returns (height, width) in pixels to which each frame is resized.

    Raises:
        BadRequest, TooLarge: as ``frame_size``.
    """
    if limits.clip is None or options.resized_height is not None:
        return frame_size(height, width, len(chosen.indices), limits, options)
    # Where frames are evenly spaced, the one that is repeated is not counted.
    frames = len(chosen.indices) if limits.rule else max(len(set(chosen.indices)), FRAMES_PER_PATCH)
    check_aspect(height, width)
    least, most = limits.clip
    if options.total_pixels is not None:
        most = min(most, options.total_pixels)
    most = min(most, frames * min(limits.most, options.max_pixels or limits.most))
    if options.min_pixels is not None:
        least = frames * options.min_pixels
        if least > most:
            raise BadRequest(f"min_pixels={options.min_pixels} is above the limit of {most // frames} a frame.")
    size = _resize_clip(height, width, frames, limits.factor, min(least, most), most)
    if not limits.fits(limits.grid(size)):
        raise TooLarge(f"Frames of {size[1]}x{size[0]} pixels exceed this server's limit of {limits.most}.")
    return size


def _resize_clip(height: int, width: int, frames: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Returns (height, width), multiples of ``factor``.

    ``least`` and ``most`` bound the pixels of all frames, counted in whole pairs.
    """
    if height < factor or width < factor:
        grow = max(factor / height, factor / width)
        height, width = int(height * grow), int(width * grow)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    counted = round(frames / FRAMES_PER_PATCH) * FRAMES_PER_PATCH * rows * columns
    if counted > most:
        shrink = math.sqrt(frames * height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif counted < least:
        grow = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns
