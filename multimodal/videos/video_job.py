"""The decode worker's job for videos: decode, sample, resize, cut into temporal patches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from trencadis.core.errors import BadRequest, TooLarge
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.multimodal.images.image_header import inspect_header
from trencadis.multimodal.images.pil_decode import decode, load_pil_image
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MediaOptions
from trencadis.multimodal.patch_packing import MERGE, PATCH
from trencadis.multimodal.videos.frame_sampling import (
    FRAMES_PER_PATCH,
    FrameLimits,
    FrameSampling,
    sample_clip_frames,
    sample_frame_list,
)
from trencadis.multimodal.videos.frame_size import clip_frame_size, list_frame_size
from trencadis.multimodal.videos.video_file import decode_frames, frame_delays, open_video

Values = JsonObject
Rgb = npt.NDArray[np.uint8]
MAX_ANIMATION_FRAMES = 10_000
"""Maximum number of frames of an animation."""
MAX_LIST_SECONDS = 1 << 20
"""Maximum seconds that a list of frames may span; positions count time, and are int32."""
MAX_DECODED_PIXELS = 1 << 31
"""Maximum pixels of an animation's frames together; each must be decoded to reach the next."""


class FramePart(NamedTuple):
    """One frame of a list: number of bytes, and height and width in pixels if they are raw RGB (0, 0: an image
    file).
    """

    nbytes: int
    height: int = 0
    width: int = 0


class ClipTooLarge(BadRequest):
    """Error of a video that needs more tokens than this request has left; another request may have more."""


def prepare_video(data: bytes | bytearray, options: JsonMapping) -> tuple[Values, Sequence[memoryview]]:
    """Prepares a video file, an animation, or the frames of a list.

    Args:
        data: one file, or the frames of a list one after the other.
        options: ``media``, the fields of a MediaOptions that are set; ``limits``, the fields of FrameLimits;
            ``max_pixels`` of a frame before resizing; ``max_frames`` to sample; ``max_seconds`` of a file; ``room``,
            tokens that the prompt has left. For a list, ``parts``: per frame [bytes, height, width] of raw RGB, or
            [bytes, 0, 0] of an image file.

    Returns:
        ``indices``, ``fps``, ``rate``, ``frames``, ``size`` (height, width) and ``resize_seconds``, and per temporal
        patch a buffer, uint8 [patches, patch values]; or only ``no_room``, a message, if it needs more than ``room``
        tokens.

    Raises:
        BadRequest, TooLarge, UnsupportedMedia: the bytes or the options are at fault.
    """
    try:
        return _prepare(data, options, MediaOptions(**options["media"]), FrameLimits(**options["limits"]))
    except ClipTooLarge as error:
        return {"no_room": error.message}, []


def _prepare(
    data: bytes | bytearray, options: JsonMapping, requested: MediaOptions, limits: FrameLimits
) -> tuple[Values, Sequence[memoryview]]:
    if "parts" in options:
        return _from_listed_frames(data, options, requested, limits)
    if data[:3] == b"GIF" or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return _from_animation(bytes(data), options, requested, limits)
    with open_video(data, options["max_pixels"]) as file:
        _check_duration(file.frames / file.fps, options)
        chosen = sample_clip_frames(file.frames, file.fps, limits, requested)
        size = _check_frame_size(file.height, file.width, chosen, options, requested, limits)
        images = (np.ascontiguousarray(f) for f in file.read(chosen.indices))
        return _cut_frames(images, file.frames, chosen, size, options, requested, limits)


def _from_animation(
    data: bytes, options: JsonMapping, requested: MediaOptions, limits: FrameLimits
) -> tuple[Values, Sequence[memoryview]]:
    header = inspect_header(data, options["max_pixels"])
    shown = frame_delays(data, header, MAX_ANIMATION_FRAMES)
    seconds = sum(shown) / 1000
    _check_duration(seconds, options)
    chosen = sample_clip_frames(len(shown), len(shown) / seconds, limits, requested)
    if header.width * header.height * (chosen.indices[-1] + 1) > MAX_DECODED_PIXELS:
        raise TooLarge("The animation has too many pixels in all.")
    size = _check_frame_size(header.height, header.width, chosen, options, requested, limits)
    images = (np.asarray(f) for f in decode_frames(data, header, chosen.indices))
    return _cut_frames(images, len(shown), chosen, size, options, requested, limits)


def _from_listed_frames(
    data: bytes | bytearray, options: JsonMapping, requested: MediaOptions, limits: FrameLimits
) -> tuple[Values, Sequence[memoryview]]:
    parts = [FramePart(*part) for part in options["parts"]]
    chosen = sample_frame_list(len(parts), requested)
    if len(parts) / chosen.fps > MAX_LIST_SECONDS:
        raise BadRequest(f"At fps={chosen.fps:g} the frames would last more than {MAX_LIST_SECONDS} seconds.")
    images = _listed_images(data, parts, options["max_pixels"], limits, requested)
    first = next(images)
    size = _check_frame_size(first.shape[0], first.shape[1], chosen, options, requested, limits)

    def all_of() -> Iterator[Rgb]:
        last = first
        yield first
        for number, last in enumerate(images, 1):
            if last.shape != first.shape:
                raise BadRequest(f"Frame {number} of the video has another size than frame 0.")
            yield last
        yield from [last] * (len(parts) % FRAMES_PER_PATCH)

    return _cut_frames(all_of(), len(parts), chosen, size, options, requested, limits)


def _listed_images(
    data: bytes | bytearray, parts: Sequence[FramePart], max_pixels: int, limits: FrameLimits,
    requested: MediaOptions,
) -> Iterator[Rgb]:  # fmt: skip
    """Yields the frames of a list, each resized as a separate image (see ``list_frame_size``)."""
    at = 0
    for size, height, width in parts:
        file = bytes(data[at : at + size])
        at += size
        if height:
            image = load_pil_image(Image.frombytes("RGB", (width, height), file), max_pixels)
        else:
            image = decode(file, inspect_header(file, max_pixels))
        rows, columns = list_frame_size(image.height, image.width, limits, requested)
        yield np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC))


def _check_duration(seconds: float, options: JsonMapping) -> None:
    if seconds > options["max_seconds"]:
        raise TooLarge(f"The video lasts {seconds:.0f} seconds; the limit is {options['max_seconds']:.0f}.")


def _check_frame_size(
    height: int,
    width: int,
    chosen: FrameSampling,
    options: JsonMapping,
    requested: MediaOptions,
    limits: FrameLimits,
) -> tuple[int, int]:
    """Returns the (height, width) of resized frames. Refuses too many frames or tokens before decoding."""
    taken = len(chosen.indices)
    if taken > options["max_frames"]:
        raise TooLarge(f"{taken} frames would be sampled from the video; the limit is {options['max_frames']}.")
    size = clip_frame_size(height, width, chosen, limits, requested)
    tokens = chosen.patches * size[0] * size[1] // limits.cell**2
    if tokens >= options["room"]:
        raise ClipTooLarge(
            f"The video needs {tokens} tokens ({chosen.patches} x {size[1]}x{size[0]} pixels), and the context has "
            f"{options['room']} left; lower fps, max_frames, max_pixels or total_pixels."
        )
    return size


def _cut_frames(
    images: Iterator[Rgb], frames: int, chosen: FrameSampling, size: tuple[int, int], options: JsonMapping,
    requested: MediaOptions, limits: FrameLimits,
) -> tuple[Values, Sequence[memoryview]]:  # fmt: skip
    buffers: list[memoryview] = []
    shape: tuple[int, ...] | None = None
    last: tuple[Rgb, Rgb] | None = None
    pair: list[Rgb] = []
    spent = 0.0
    for image in images:
        if shape is None:
            # Only a decoded frame shows that a rotated video swaps height and width.
            shape = image.shape
            size = _check_frame_size(shape[0], shape[1], chosen, options, requested, limits)
        begun = time.perf_counter()
        if last is None or image is not last[0]:
            last = image, resize_frame(image, size)
        pair.append(last[1])
        if len(pair) == FRAMES_PER_PATCH:
            pixels = cut_temporal_patch(pair[0], pair[1], limits.patch)
            buffers.append(memoryview(pixels.data).cast("B"))
            pair = []
        spent += time.perf_counter() - begun
    if len(buffers) != chosen.patches:
        raise BadRequest("The video is truncated or damaged.")
    values = {
        "indices": chosen.indices, "fps": chosen.fps, "rate": chosen.rate, "frames": frames, "size": size,
        "resize_seconds": spent,
    }  # fmt: skip
    return values, buffers


def resize_frame(image: Rgb, size: tuple[int, int]) -> Rgb:
    """Resizes uint8 [height, width, 3] to ``size`` (height, width): antialiased bicubic in float32, rounded once.

    torchvision, by which qwen-vl-utils resizes frames, does the same; Pillow on bytes rounds and clips after each pass.
    """
    height, width = size
    if image.shape[:2] == size:
        return image
    out = np.empty((height, width, 3), np.uint8)
    for channel in range(3):
        plane = Image.fromarray(image[:, :, channel].astype(np.float32))
        smooth = np.asarray(plane.resize((width, height), Image.Resampling.BICUBIC))
        out[:, :, channel] = np.rint(np.clip(smooth, 0, 255))
    return out


def cut_temporal_patch(first: Rgb, second: Rgb, patch: int = PATCH) -> npt.NDArray[np.uint8]:
    """Cuts two frames, uint8 [height, width, 3], into one temporal patch, uint8 [patches, 3 x 2 x patch x patch]."""
    h, w = first.shape[0] // patch, first.shape[1] // patch
    out = np.empty((h // MERGE, w // MERGE, MERGE, MERGE, 3, FRAMES_PER_PATCH, patch, patch), np.uint8)
    for at, frame in enumerate((first, second)):
        cells = frame.reshape(h // MERGE, MERGE, patch, w // MERGE, MERGE, patch, 3)
        out[:, :, :, :, :, at] = cells.transpose(0, 3, 1, 4, 6, 2, 5)
    return out.reshape(h * w, 3 * FRAMES_PER_PATCH * patch * patch)
