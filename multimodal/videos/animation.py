"""Animated GIF and WebP: counts and times frames from the file's structure, decodes them with Pillow."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice

from PIL import Image

from trencadis.core.errors import BadRequest, TooLarge
from trencadis.multimodal.images.image_header import Header
from trencadis.multimodal.images.pil_decode import decoder_errors, to_rgb

SHORTEST_DELAY, DEFAULT_DELAY = 20, 100
"""Milliseconds: a frame whose delay is below the first is shown for the second, as in browsers and ffmpeg."""
CUT_OFF = "The animation is truncated or damaged."


def frame_delays(data: bytes, header: Header, most: int) -> list[int]:
    """Returns the milliseconds for which each frame is shown, read without decoding; one entry for a still image.

    Raises:
        BadRequest: a frame's header is cut off.
        TooLarge: more than ``most`` frames.
    """
    each = _gif(data) if header.format == "GIF" else _webp(data) if header.format == "WEBP" else iter(())
    try:
        found = list(islice(each, most + 1))
        if len(found) > most:
            raise TooLarge(f"The animation has more than {most} frames.")
    except (IndexError, struct.error):
        raise BadRequest(CUT_OFF) from None
    return [DEFAULT_DELAY if ms < SHORTEST_DELAY else ms for ms in found] or [DEFAULT_DELAY]


def decode_frames(data: bytes, header: Header, wanted: Sequence[int]) -> Iterator[Image.Image]:
    """Yields upright RGB images of the frames ``wanted`` (ascending, repeats allowed), decoding one at a time.

    Raises:
        BadRequest: a frame is damaged or missing.
    """
    with decoder_errors(), Image.open(BytesIO(data), formats=(header.format,)) as image:
        for at, index in enumerate(wanted):
            if not at or index != wanted[at - 1]:
                try:
                    # Each frame is a change to the previous one, so every frame on the way must be decoded.
                    for step in range(image.tell() if at else 0, index + 1):
                        image.seek(step)
                except EOFError:
                    raise BadRequest(CUT_OFF) from None
                image.load()
                current = to_rgb(image.copy())
            yield current


def _gif(data: bytes) -> Iterator[int]:
    flags = data[10]
    at = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    delay = 0
    while at < len(data):
        kind = data[at]
        if kind == 0x2C:
            flags = data[at + 9]
            at += 10 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0) + 1
            yield delay * 10
            delay = 0
        elif kind == 0x21:
            if data[at + 1] == 0xF9 and data[at + 2] == 4:
                delay = struct.unpack_from("<H", data, at + 4)[0]
            at += 2
        else:
            return
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1


def _webp(data: bytes) -> Iterator[int]:
    at = 12
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"ANMF":
            yield int.from_bytes(data[at + 20 : at + 23], "little")
        at += 8 + size + size % 2
