"""The job that turns a clip's bytes into temporal patches: decode, sample, resize, cut. Runs in decode workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trencadis.core.errors import BadRequest, TooLarge
from trencadis.core.layout import MERGE, PATCH
from trencadis.multimodal.images.decode import adopt, decode
from trencadis.multimodal.images.header import inspect_header
from trencadis.multimodal.options import MediaOptions
from trencadis.multimodal.videos.animation import delays
from trencadis.multimodal.videos.animation import frames as animated
from trencadis.multimodal.videos.file import opened
from trencadis.multimodal.videos.sampling import (
    PAIR,
    FrameLimits,
    FrameSampling,
    first_size,
    frame_size,
    listed,
    sample,
)

Values = dict[str, Any]
Rgb = npt.NDArray[np.uint8]
MOST_ANIMATED = 10_000
"""Frames of an animation."""
MOST_LISTED = 1 << 20
"""Seconds that a list of frames may stand for; positions count time, and are int32."""
MOST_DECODED = 1 << 31
"""Pixels that an animation's frames may have together; each must be decoded to reach the next."""


class ClipTooLarge(BadRequest):
    """The clip is longer than what this request has left; another one may have more."""


def clip(data: bytes | bytearray, options: Mapping[str, Any]) -> tuple[Values, Sequence[memoryview]]:
    """A video file, an animated picture, or the files of a list of frames.

    Args:
        data: a file, or files one after the other.
        options: ``media``, the fields of a MediaOptions that are set; ``limits``, those of FrameLimits; ``max_pixels``
            of a frame before resizing; ``max_frames`` taken; ``max_seconds`` of a file; ``room``, tokens that the
            model has left for it. For a list, ``parts``: per frame its bytes, and height and width where these are
            raw RGB (else 0, 0).

    Returns:
        ``indices``, ``fps``, ``frames``, ``size`` (height, width) and ``resize_seconds``, and uint8 [patches,
        PATCH_VALUES] of each temporal patch; or ``no_room``, a text, where it needs more than ``room``.

    Raises:
        BadRequest, TooLarge, UnsupportedMedia: about the bytes or what is asked of them.
    """
    try:
        return _clip(data, options, MediaOptions(**options["media"]), FrameLimits(**options["limits"]))
    except ClipTooLarge as error:
        return {"no_room": error.message}, []


def _clip(
    data: bytes | bytearray, options: Mapping[str, Any], asked: MediaOptions, limits: FrameLimits
) -> tuple[Values, Sequence[memoryview]]:
    if "parts" in options:
        return _list(data, options, asked, limits)
    if data[:3] == b"GIF" or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return _animation(bytes(data), options, asked, limits)
    with opened(data, options["max_pixels"]) as file:
        _short_enough(file.frames / file.fps, options)
        chosen = sample(file.frames, file.fps, asked)
        size = _planned(file.height, file.width, chosen, options, asked, limits)
        pictures = (np.ascontiguousarray(f) for f in file.read(chosen.indices))
        return _cut(pictures, file.frames, chosen, size, options, asked, limits)


def _animation(
    data: bytes, options: Mapping[str, Any], asked: MediaOptions, limits: FrameLimits
) -> tuple[Values, Sequence[memoryview]]:
    header = inspect_header(data, options["max_pixels"])
    shown = delays(data, header, MOST_ANIMATED)
    seconds = sum(shown) / 1000
    _short_enough(seconds, options)
    chosen = sample(len(shown), len(shown) / seconds, asked)
    if header.width * header.height * (chosen.indices[-1] + 1) > MOST_DECODED:
        raise TooLarge("The animation has too many pixels in all.")
    size = _planned(header.height, header.width, chosen, options, asked, limits)
    pictures = (np.asarray(f) for f in animated(data, header, chosen.indices))
    return _cut(pictures, len(shown), chosen, size, options, asked, limits)


def _list(
    data: bytes | bytearray, options: Mapping[str, Any], asked: MediaOptions, limits: FrameLimits
) -> tuple[Values, Sequence[memoryview]]:
    parts: Sequence[tuple[int, int, int]] = options["parts"]
    chosen = listed(len(parts), asked)
    if len(parts) / chosen.fps > MOST_LISTED:
        raise BadRequest(f"At fps={chosen.fps:g} the frames would last more than {MOST_LISTED} seconds.")
    pictures = _pictures(data, parts, options["max_pixels"], limits, asked)
    first = next(pictures)
    size = _planned(first.shape[0], first.shape[1], chosen, options, asked, limits)

    def all_of() -> Iterator[Rgb]:
        last = first
        yield first
        for number, last in enumerate(pictures, 1):
            if last.shape != first.shape:
                raise BadRequest(f"Frame {number} of the video has another size than frame 0.")
            yield last
        yield from [last] * (len(parts) % PAIR)

    return _cut(all_of(), len(parts), chosen, size, options, asked, limits)


def _pictures(
    data: bytes | bytearray, parts: Sequence[tuple[int, int, int]], max_pixels: int, limits: FrameLimits,
    asked: MediaOptions,
) -> Iterator[Rgb]:  # fmt: skip
    """Frames of a list, each resized as a picture of its own (see ``first_size``)."""
    at = 0
    for size, height, width in parts:
        file = bytes(data[at : at + size])
        at += size
        if height:
            image = adopt(Image.frombytes("RGB", (width, height), file), max_pixels)
        else:
            image = decode(file, inspect_header(file, max_pixels))
        rows, columns = first_size(image.height, image.width, limits, asked)
        yield np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC))


def _short_enough(seconds: float, options: Mapping[str, Any]) -> None:
    if seconds > options["max_seconds"]:
        raise TooLarge(f"The video lasts {seconds:.0f} seconds; the limit is {options['max_seconds']:.0f}.")


def _planned(
    height: int, width: int, chosen: FrameSampling, options: Mapping[str, Any], asked: MediaOptions, limits: FrameLimits
) -> tuple[int, int]:
    """The frames' size, once it is clear that they are not too many for the model; nothing is decoded before."""
    taken = len(chosen.indices)
    if taken > options["max_frames"]:
        raise TooLarge(f"{taken} frames would be taken of the video; the limit is {options['max_frames']}.")
    size = frame_size(height, width, taken, limits, asked)
    tokens = chosen.patches * size[0] * size[1] // (PATCH * MERGE) ** 2
    if tokens >= options["room"]:
        raise ClipTooLarge(
            f"The video needs {tokens} tokens ({chosen.patches} x {size[1]}x{size[0]} pixels), and the context has "
            f"{options['room']} left; lower fps, max_frames, max_pixels or total_pixels."
        )
    return size


def _cut(
    pictures: Iterator[Rgb], frames: int, chosen: FrameSampling, size: tuple[int, int], options: Mapping[str, Any],
    asked: MediaOptions, limits: FrameLimits,
) -> tuple[Values, Sequence[memoryview]]:  # fmt: skip
    buffers: list[memoryview] = []
    shape: tuple[int, ...] | None = None
    last: tuple[Rgb, Rgb] | None = None
    pair: list[Rgb] = []
    spent = 0.0
    for picture in pictures:
        if shape is None:
            # A rotated clip shows only now that it stands upright in another format.
            shape = picture.shape
            size = _planned(shape[0], shape[1], chosen, options, asked, limits)
        begun = time.perf_counter()
        if last is None or picture is not last[0]:
            last = picture, resized(picture, size)
        pair.append(last[1])
        if len(pair) == PAIR:
            pixels = patches_of(pair[0], pair[1])
            buffers.append(memoryview(pixels.data).cast("B"))
            pair = []
        spent += time.perf_counter() - begun
    if len(buffers) != chosen.patches:
        raise BadRequest("The video is truncated or damaged.")
    values = {"indices": chosen.indices, "fps": chosen.fps, "frames": frames, "size": size, "resize_seconds": spent}
    return values, buffers


def resized(picture: Rgb, size: tuple[int, int]) -> Rgb:
    """uint8 [height, width, 3] resized to ``size``: antialiased bicubic in float32, rounded once, ties to even.

    That is torchvision's arithmetic, which qwen-vl-utils uses for frames; Pillow's on bytes rounds and clips twice.
    """
    height, width = size
    if picture.shape[:2] == size:
        return picture
    out = np.empty((height, width, 3), np.uint8)
    for channel in range(3):
        plane = Image.fromarray(picture[:, :, channel].astype(np.float32))
        smooth = np.asarray(plane.resize((width, height), Image.Resampling.BICUBIC))
        out[:, :, channel] = np.rint(np.clip(smooth, 0, 255))
    return out


def patches_of(first: Rgb, second: Rgb) -> npt.NDArray[np.uint8]:
    """Two frames uint8 [height, width, 3] to one temporal patch, uint8 [patches, 3 x 2 x 14 x 14] in cell order."""
    h, w = first.shape[0] // PATCH, first.shape[1] // PATCH
    out = np.empty((h // MERGE, w // MERGE, MERGE, MERGE, 3, PAIR, PATCH, PATCH), np.uint8)
    for at, frame in enumerate((first, second)):
        cells = frame.reshape(h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH, 3)
        out[:, :, :, :, :, at] = cells.transpose(0, 3, 1, 4, 6, 2, 5)
    return out.reshape(h * w, 3 * PAIR * PATCH * PATCH)
