"""Frame sampling and sizes by the rules of a model's own video processor in transformers.

Limits apply to all frames together, so that a short clip keeps larger frames. A request's options have their usual
meaning: min_pixels and max_pixels limit a frame, total_pixels all frames.
"""

from __future__ import annotations

import math

import numpy as np

from trencadis.core.errors import BadRequest, TooLarge
from trencadis.core.shared_constants import MAX_CLIP_FRAMES
from trencadis.multimodal.media_options import NO_OPTIONS, MediaOptions
from trencadis.multimodal.patch_grids import check_aspect
from trencadis.multimodal.videos.frame_sampling import (
    FPS,
    FRAMES_PER_PATCH,
    MIN_FRAMES,
    FrameLimits,
    FrameSampling,
    frame_size,
    sample_frames,
    time_range,
)


def sample_clip_frames(
    frames: int, fps: float, limits: FrameLimits, options: MediaOptions = NO_OPTIONS
) -> FrameSampling:
    """Samples a video of ``frames`` frames at ``fps``, evenly spaced; an odd number repeats the last one.

    Raises:
        BadRequest: as ``sample_frames``.
    """
    if limits.clip is None:
        return sample_frames(frames, fps, options)
    if frames < 1 or not 0 < fps < math.inf:
        raise BadRequest("The video has no frames.")
    first, last = time_range(frames, fps, options) if frames > 1 else (0, 0)
    total = last - first + 1
    if options.nframes is not None:
        count = options.nframes
        if count > total:
            raise BadRequest(f"The video has {total} frames; {count} cannot be taken.")
    else:
        least = MIN_FRAMES if options.min_frames is None else options.min_frames
        most = MAX_CLIP_FRAMES if options.max_frames is None else options.max_frames
        count = min(max(int(total / fps * (FPS if options.fps is None else options.fps)), least), most, total)
    taken = tuple(int(i) for i in np.linspace(first, last, count).round())
    return FrameSampling((*taken, *taken[-1:] * (count % FRAMES_PER_PATCH)), count / total * fps, fps)


def clip_frame_size(
    height: int, width: int, chosen: FrameSampling, limits: FrameLimits, options: MediaOptions = NO_OPTIONS
) -> tuple[int, int]:
    """Returns (height, width) in pixels to which each frame is resized.

    Raises:
        BadRequest, TooLarge: as ``frame_size``.
    """
    if limits.clip is None or options.resized_height is not None:
        return frame_size(height, width, len(chosen.indices), limits, options)
    frames = max(len(set(chosen.indices)), FRAMES_PER_PATCH)  # without the one that is repeated
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
