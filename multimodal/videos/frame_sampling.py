"""Limits of a video's frames, the frames that the model sees, and their times.

The rules are qwen-vl-utils' (0.0.14), or those of the model's own video processor in transformers.

A *temporal patch* is two frames; an odd list of frames repeats its last one. Numpy serves only for float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trencadis.core.errors import BadRequest
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MAX_CLIP_FRAMES, NO_OPTIONS, MediaOptions
from trencadis.multimodal.patch_packing import MERGE, PATCH, Grid, count_slots, count_tokens, patch_grid

FPS = 2.0
"""Default frames to sample per second; also the default rate of a list of frames."""
FRAMES_PER_PATCH = 2
"""Frames of a temporal patch."""
MIN_FRAMES = 4
FRAME_TOKENS = (128, 768)
"""Default minimum and maximum tokens of a temporal patch."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Limits of one frame after resizing, as the checkpoint and the operator set them for images.

    Args:
        least: minimum pixels.
        most: maximum pixels.
        factor: pixels of which sides are multiples.
        cell: pixels along the side of a merge cell of ``MERGE`` x ``MERGE`` patches, which becomes one token.
        slots: VISION slots of the largest image that the server planned for.
        tokens: decoder tokens of that image.
    """

    least: int = 3136
    most: int = 12_845_056
    factor: int = PATCH * MERGE
    cell: int = PATCH * MERGE
    slots: int = 1 << 30
    tokens: int = 1 << 30
    windows: bool = True
    """True if the tower's slots stand in windows of 8 x 8 patches."""
    clip: tuple[int, int] | None = None
    """Minimum and maximum pixels of all frames together, if the model's own video processor sets them, which then
    also chooses frames (``sample_clip_frames``); None: qwen-vl-utils' rules.
    """
    rule: str = ""
    """With ``clip``: the rule by which frames are chosen, a key of ``CLIP_RULES``; "": they are evenly
    spaced.
    """

    @property
    def patch(self) -> int:
        """Pixels along the side of a patch."""
        return self.cell // MERGE

    def grid(self, size: tuple[int, int]) -> Grid:
        """Returns the patches of a frame of ``size`` (height, width) pixels."""
        return patch_grid(*size, self.patch)

    def fits(self, grid: Grid) -> bool:
        """Returns True if a frame of ``grid`` is within what the server planned for."""
        return count_slots(grid, self.windows) <= self.slots and count_tokens(grid) <= self.tokens

    @property
    def defaults(self) -> tuple[int, int]:
        """Default (minimum, maximum) pixels of a frame."""
        least, most = (tokens * self.cell**2 for tokens in FRAME_TOKENS)
        # A checkpoint whose largest image is below qwen-vl-utils' smallest frame has the limits of images for frames.
        return (least if least <= self.most else self.least), min(most, self.most)


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """The sampled frames.

    Args:
        indices: indices of frames in the video, ascending, an even number of them (a single frame is repeated).
        fps: rate of the sampled frames.
        rate: frame rate of the video itself.
    """

    indices: tuple[int, ...]
    fps: float
    rate: float

    @property
    def patches(self) -> int:
        """Number of temporal patches."""
        return len(self.indices) // FRAMES_PER_PATCH

    @property
    def seconds(self) -> float:
        """Seconds from one temporal patch to the next (``second_per_grid_t``)."""
        return FRAMES_PER_PATCH / self.fps


def sample_frames(frames: int, fps: float, options: MediaOptions = NO_OPTIONS) -> FrameSampling:
    """Samples a video of ``frames`` frames at ``fps``: evenly spaced, first and last included.

    ``nframes`` sets their number, else ``fps`` within ``min_frames`` and ``max_frames``; ``video_start`` and
    ``video_end`` cut the video first. A video of one frame, which qwen-vl-utils refuses, gives that frame twice.

    Raises:
        BadRequest: no frames, more requested than there are, fewer than two, or an empty time range.
    """
    if frames < 1 or not 0 < fps < math.inf:
        raise BadRequest("The video has no frames.")
    if frames == 1:
        return FrameSampling((0, 0), fps, fps)
    first, last = time_range(frames, fps, options)
    total = last - first + 1
    count = _count_frames(total, fps, options)
    return FrameSampling(evenly_spaced(first, last, count), count / total * fps, fps)


def sample_frame_list(frames: int, options: MediaOptions = NO_OPTIONS) -> FrameSampling:
    """Samples every frame of a list and repeats the last if their number is odd; ``options.fps`` is their rate.

    Raises:
        BadRequest: the list is empty.
    """
    if frames < 1:
        raise BadRequest("The video has no frames.")
    rate = options.fps or FPS
    return FrameSampling((*range(frames), *[frames - 1] * (frames % FRAMES_PER_PATCH)), rate, rate)


def evenly_spaced(first: int, last: int, count: int) -> tuple[int, ...]:
    """Returns ``count`` integers from ``first`` to ``last`` inclusive, evenly spaced, ties to even.

    Counts in float32 and from both ends, like ``torch.linspace``: a wider type would round some ties the other way.
    """
    if count < 2:
        return (first,) * count
    step = np.float64(np.float32(last - first) / np.float32(count - 1))
    i = np.arange(count)
    line = np.where(i < count // 2, first + step * i, last - step * (count - 1 - i)).astype(np.float32)
    return tuple(int(x) for x in np.rint(line))


def time_range(frames: int, fps: float, options: MediaOptions) -> tuple[int, int]:
    """Returns the first and last frame between ``video_start`` and ``video_end``.

    Raises BadRequest if they leave fewer than two.
    """
    length = frames / fps
    first, last = 0, frames - 1
    if options.video_start is not None:
        first = math.ceil(min(options.video_start, length) * fps)
    if options.video_end is not None:
        last = min(math.floor(min(options.video_end, length) * fps), frames - 1)
    if first >= last:
        raise BadRequest(f"video_start and video_end leave no two frames of the video's {length:.2f} seconds.")
    return first, last


def _count_frames(total: int, fps: float, options: MediaOptions) -> int:
    if options.nframes is not None:
        count = round(options.nframes / FRAMES_PER_PATCH) * FRAMES_PER_PATCH
    else:
        least = (
            math.ceil((MIN_FRAMES if options.min_frames is None else options.min_frames) / FRAMES_PER_PATCH)
            * FRAMES_PER_PATCH
        )
        most = min(MAX_CLIP_FRAMES, total) if options.max_frames is None else options.max_frames
        wanted = total / fps * (FPS if options.fps is None else options.fps)
        count = (
            math.floor(min(max(wanted, least), most // FRAMES_PER_PATCH * FRAMES_PER_PATCH, total) / FRAMES_PER_PATCH)
            * FRAMES_PER_PATCH
        )
    if not FRAMES_PER_PATCH <= count <= total:
        raise BadRequest(f"The video has {total} frames; {count} cannot be taken (at least {FRAMES_PER_PATCH}).")
    return count


MAX_RULE_SECONDS = 300
"""Seconds of a video of which each is sampled at ``FPS`` by the rule ``seconds``; of a longer one as many frames."""

DENSE_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""(seconds of a video at most, temporal patches a second) of the rule ``dense``."""

MOST_DENSE_FRAMES = 640


def sample_seconds(total: int, fps: float) -> tuple[int, ...]:
    """Samples ``FPS`` frames of each second, none of them twice; an odd number repeats the last one."""
    seconds = total / fps
    if seconds <= MAX_RULE_SECONDS:
        found = [min(total - 1, math.ceil(i * fps / FPS)) for i in range(max(math.floor(seconds * FPS), 1))]
    elif (count := int(MAX_RULE_SECONDS * FPS)) >= total:
        found = list(range(total))
    else:
        found = [min(total - 1, math.ceil(t * fps)) for t in np.linspace(0, seconds, count)]
    return pad_to_pairs(list(dict.fromkeys(found)))


def sample_dense(total: int, fps: float) -> tuple[int, ...]:
    """Samples one to six frames of each second, fewer the longer the video is, at most 640, none of them twice; an odd
    number repeats the last one.
    """
    seconds = total / fps
    counted = min(seconds, DENSE_RATES[-1][0])
    rate = next(rate for most, rate in DENSE_RATES if counted <= most)
    count = min(int(counted * rate * FRAMES_PER_PATCH), MOST_DENSE_FRAMES)
    found: list[int] = []
    if total < count:
        found = np.linspace(0, total - 1, count, dtype=int).tolist()
    else:
        due, duration = 0.0, 1 / fps
        for index in range(total):
            if index * duration >= due:
                due += 1 / (FRAMES_PER_PATCH * rate)
                found.append(index)
                if due >= int(seconds):
                    break
    if len(found) < count:
        found = np.linspace(found[0] if found else 0, found[-1] if found else total - 1, count, dtype=int).tolist()
    elif len(found) > count:
        found = np.linspace(0, total - 1, count, dtype=int).tolist()
    return pad_to_pairs(list(dict.fromkeys(found)))


def pad_to_pairs(indices: list[int]) -> tuple[int, ...]:
    """Returns an even number of indices, at least two; the last one may be repeated."""
    found = indices or [0]
    return (*found, *found[-1:] * (len(found) % FRAMES_PER_PATCH))


CLIP_RULES = {"seconds": sample_seconds, "dense": sample_dense}


def sample_clip_frames(
    frames: int, fps: float, limits: FrameLimits, options: MediaOptions = NO_OPTIONS
) -> FrameSampling:
    """Samples a video of ``frames`` frames at ``fps``, evenly spaced, or by the limits' rule if ``options`` ask for no
    number of frames; an odd number repeats the last one.

    Raises:
        BadRequest: as ``sample_frames``.
    """
    if limits.clip is None:
        return sample_frames(frames, fps, options)
    if frames < 1 or not 0 < fps < math.inf:
        raise BadRequest("The video has no frames.")
    first, last = time_range(frames, fps, options) if frames > 1 else (0, 0)
    total = last - first + 1
    if limits.rule and options.nframes is options.min_frames is options.max_frames is options.fps is None:
        found = tuple(first + i for i in CLIP_RULES[limits.rule](total, fps))
        return FrameSampling(found, len(found) / total * fps, fps)
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
