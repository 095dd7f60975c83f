"""Video files through PyAV (``pip install trencadis[video]``): counts frames and decodes the requested ones.

Files are opened with a named container format from a fixed list: when it detects the format, ffmpeg also opens
playlists, which make it read other files and addresses.

Animated GIF and WebP: counts and times frames from the file's structure, decodes them with Pillow.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trencadis.core.errors import BadRequest, TooLarge, TrencadisError, UnsupportedMedia
from trencadis.multimodal.images.image_header import Header, check_size
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


MISSING = (
    "Video files need PyAV on the server: pip install 'trencadis[video]'. GIF, WebP and lists of frames work without."
)
DAMAGED = "The video is truncated or damaged."
MAX_FRAMES = 1 << 20
INDEXED = ("mov", "matroska")
"""Formats with exact seeking."""
EARLY = -(1 << 62)
SYNC = 188
"""Bytes of an MPEG transport packet; each begins with 0x47."""


def container_format(data: bytes | bytearray) -> str | None:
    """Returns ffmpeg's name for the format that the first bytes indicate.

    None if it is not in the list of supported formats.
    """
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mov"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:4] == b"\x00\x00\x01\xba":
        return "mpeg"
    if data[:3] == b"FLV":
        return "flv"
    if data[:4] == b"OggS":
        return "ogg"
    if len(data) > 2 * SYNC and data[0] == data[SYNC] == data[2 * SYNC] == 0x47:
        return "mpegts"
    return None


@dataclass
class VideoFile:
    """The first video stream of a file.

    Args:
        width: width in pixels before any rotation; likewise ``height``.
        fps: the stream's average frame rate.
        frames: number of frames.
        times: presentation times of the frames, ascending, in the stream's time base; None if the container's times or
            index are unreliable: then frames are decoded and counted from the start.
        keys: times of keyframes, at which decoding can begin.
        file: PyAV's container, ``stream`` its video stream.
    """

    width: int
    height: int
    fps: float
    frames: int
    times: list[int] | None
    keys: list[int]
    file: Any
    stream: Any

    def read(self, wanted: Sequence[int]) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the frames ``wanted`` (ascending indices, repeats allowed) as upright uint8 [height, width, 3].

        Call it once. A frame that does not decode is replaced by the next one that does, or at the end by the last.

        Raises:
            BadRequest: no frame decodes.
        """
        with _typed_errors():
            found = self._read_in_order(wanted) if self.times is None else self._read_by_seeking(wanted, self.times)
            for frame in found:
                if frame is None:
                    raise BadRequest(DAMAGED)
                yield self._upright(frame)

    def _read_in_order(self, wanted: Sequence[int]) -> Iterator[Any]:
        decoded = self.file.decode(self.stream)
        at, shown = -1, None
        for index in wanted:
            while at < index and (frame := next(decoded, None)) is not None:
                at, shown = at + 1, frame
            yield shown

    def _read_by_seeking(self, wanted: Sequence[int], times: Sequence[int]) -> Iterator[Any]:
        decoded: Iterator[Any] = iter(())
        at, shown = None, None
        for index in wanted:
            target = times[index]
            after = bisect_right(self.keys, target)
            key = self.keys[after - 1] if after else times[0]
            if at is None or key > at:
                # Without a seek, whole groups of frames would be decoded needlessly.
                self.file.seek(key, stream=self.stream)
                decoded, at = self.file.decode(self.stream), EARLY
            while at < target and (frame := next(decoded, None)) is not None:
                at, shown = (at + 1 if frame.pts is None else frame.pts), frame
            yield shown

    def _upright(self, frame: Any) -> npt.NDArray[np.uint8]:
        plain = frame.reformat(width=self.stream.codec_context.width, height=self.stream.codec_context.height)
        array: npt.NDArray[np.uint8] = plain.to_ndarray(format="rgb24")
        return np.rot90(array, round(getattr(frame, "rotation", 0) / 90) % 4)


@contextmanager
def open_video(data: bytes | bytearray, max_pixels: int) -> Iterator[VideoFile]:
    """Opens a file and counts its frames without decoding them.

    Raises:
        UnsupportedMedia: an unknown container format, or PyAV is not installed.
        BadRequest: the file holds no video, or is damaged.
        TooLarge: more than ``max_pixels`` pixels a frame, or more than 2^20 frames.
    """
    name = container_format(data)
    if name is None:
        raise UnsupportedMedia("The bytes are no MP4, WebM, Matroska, AVI, MPEG, FLV, Ogg, GIF or WebP video.")
    try:
        import av
    except ImportError:
        raise UnsupportedMedia(MISSING) from None
    files = []
    try:
        with _typed_errors():
            files.append(av.open(BytesIO(data), format=name, metadata_errors="ignore"))
            made = _scan_packets(files[0], max_pixels, name in INDEXED)
            if made.times is None:
                files.append(av.open(BytesIO(data), format=name, metadata_errors="ignore"))
                made = replace(made, file=files[1], stream=_stream(files[1], max_pixels))
        yield made
    finally:
        for file in files:
            file.close()


def _stream(file: Any, max_pixels: int) -> Any:
    """Returns the first video stream, set to one decoder thread and a bound on its pixels."""
    stream = next(iter(file.streams.video), None)
    if stream is None or stream.codec_context is None:
        raise BadRequest("The file holds no video.")
    context = stream.codec_context
    check_size(context.width, context.height, max_pixels)
    context.thread_count = 1
    context.options = {"max_pixels": str(max_pixels)}
    return stream


def _scan_packets(file: Any, max_pixels: int, indexed: bool) -> VideoFile:
    """Counts frames by their packets and returns the open video."""
    stream = _stream(file, max_pixels)
    times: list[int] = []
    keys: list[int] = []
    for packet in file.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        indexed = indexed and packet.pts is not None
        times.append(packet.pts if packet.pts is not None else len(times))
        if packet.is_keyframe:
            keys.append(times[-1])
        if len(times) > MAX_FRAMES:
            raise TooLarge(f"The video has more than {MAX_FRAMES} frames.")
    if not times:
        raise BadRequest("The video has no frames.")
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if rate <= 0:
        span = (max(times) - min(times)) * float(stream.time_base or 0)
        rate = (len(times) - 1) / span if span > 0 else 1.0
    known = sorted(times) if indexed and len(set(times)) == len(times) else None
    size = stream.codec_context
    return VideoFile(size.width, size.height, rate, len(times), known, sorted(keys), file, stream)


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turns any error of PyAV into BadRequest or TooLarge: ffmpeg's messages leak addresses and options."""
    try:
        yield
    except TrencadisError:
        raise
    except MemoryError:
        raise TooLarge("The video is too large to decode.") from None
    except Exception:
        raise BadRequest(DAMAGED) from None
