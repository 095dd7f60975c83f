"""Reads an image's format, size and frame count without decoding it, and refuses decompression bombs."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trencadis.core.errors import BadRequest, TooLarge, UnsupportedMedia
from trencadis.multimodal.patch_packing import check_aspect

MAX_IMAGE_PIXELS = 178956970
"""Default of VLLM_MAX_IMAGE_PIXELS."""
MAX_SIDE = 1 << 24
MAX_JPEG_SCANS = 100
MAX_TEXT_CHUNKS = 64
MAX_PACKED_CHUNKS = 16
MAX_TEXT_BYTES = 4 << 20
MAX_STEPS = 1 << 17
"""Most chunks, markers or blocks that are read; a file of nothing else would take seconds."""
BOMB_PIXELS = 1 << 24
"""Most pixels of an image whose file may be of any size, because white pages and drawings compress a thousandfold."""
BOMB_RATIO = 256
"""Most decoded bytes per byte of the file for larger images; photographs stay below 50."""
DEFLATE = 1032
"""Most bytes that one byte of a deflate stream unpacks to."""
MAX_SCANNED = 1 << 31
"""Most pixels times scans of a JPEG image."""

DAMAGED = "The image is truncated or damaged."


@dataclass(frozen=True, slots=True)
class Header:
    """The properties that a file states about its image; nothing is decoded yet.

    Args:
        format: JPEG, PNG, WEBP, GIF or BMP (Pillow's names).
        width: pixels, before any EXIF rotation.
        height: pixels, before any EXIF rotation.
        frames: 1, or 2 for two or more; only the first is used.
        depth: bits of one decoded pixel in the file's own mode.
        deflated: bytes of the deflate stream that holds the pixels (PNG); None for other formats.
        scans: passes over the image (JPEG).
    """

    format: str
    width: int
    height: int
    frames: int = 1
    depth: int = field(default=24, compare=False)
    deflated: int | None = field(default=None, compare=False)
    scans: int = field(default=1, compare=False)


def inspect_header(data: bytes | bytearray, max_pixels: int = MAX_IMAGE_PIXELS) -> Header:
    """Reads the format and size of ``data`` and applies every limit that can be checked without decoding.

    Raises:
        UnsupportedMedia: not JPEG, PNG, WebP, GIF or BMP.
        TooLarge: more than ``max_pixels``, or more pixels than an honest file of that size holds.
        BadRequest: the data is empty or cut off inside the header, width or height are impossible, the aspect ratio is
            above 200, or it has the structure of a decompression bomb.
    """
    if not data:
        raise BadRequest("The image is empty.")
    try:
        header = _parse(data)
    except (IndexError, struct.error):
        raise BadRequest(DAMAGED) from None
    check_size(header.width, header.height, max_pixels)
    pixels = header.width * header.height
    if pixels > BOMB_PIXELS and pixels * header.depth // 8 > BOMB_RATIO * len(data):
        raise TooLarge(f"The image has {header.width}x{header.height} pixels in a file of {len(data)} bytes.")
    if header.deflated is not None and pixels * header.depth // 8 > DEFLATE * (header.deflated + 64):
        raise BadRequest(DAMAGED)
    if header.scans > MAX_JPEG_SCANS or header.scans * pixels > MAX_SCANNED:
        raise BadRequest("The image has too many scans.")
    return header


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuses a size, in pixels, before memory is allocated for it.

    Raises:
        BadRequest: a side is impossible, or the aspect ratio is above 200.
        TooLarge: more than ``max_pixels``.
    """
    if not 0 < width < MAX_SIDE or not 0 < height < MAX_SIDE:
        raise BadRequest("The image's width or height is impossible.")
    check_aspect(height, width)
    if width * height > max_pixels:
        raise TooLarge(f"The image has {width}x{height} pixels; the limit is {max_pixels} in all.")


def _parse(data: bytes | bytearray) -> Header:
    for start, read in READERS:
        if start.match(data):
            return read(data)
    raise UnsupportedMedia("The bytes are no JPEG, PNG, WebP, GIF or BMP image.")


def _jpeg(data: bytes | bytearray) -> Header:
    offset = 2
    for _ in range(MAX_STEPS):
        if data[offset] != 0xFF:
            raise BadRequest(DAMAGED)
        marker = data[offset + 1]
        if marker == 0xFF:
            offset += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:
            offset += 2
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, components = struct.unpack_from(">HHB", data, offset + 5)
            break
        elif marker in (0xD8, 0xD9, 0xDA):
            raise BadRequest(DAMAGED)
        else:
            offset += 2 + max(2, struct.unpack_from(">H", data, offset + 2)[0])
    else:
        raise BadRequest(DAMAGED)
    # Each scan of a progressive image costs a pass over all its pixels, even if it has few bytes.
    return Header("JPEG", width, height, depth=8 * min(components, 4), scans=data.count(b"\xff\xda"))


@dataclass(slots=True)
class _Texts:
    """Accumulated size of the text chunks of a PNG."""

    chunks: int = 0
    packed: int = 0
    bytes: int = 0

    def add(self, size: int, packed: bool) -> None:
        self.chunks, self.bytes = self.chunks + 1, self.bytes + size
        self.packed += packed
        # A compressed chunk of 1 kB unpacks to 1 MB while the file is opened.
        if self.chunks > MAX_TEXT_CHUNKS or self.packed > MAX_PACKED_CHUNKS or self.bytes > MAX_TEXT_BYTES:
            raise BadRequest("The image carries too much text.")


def _png(data: bytes | bytearray) -> Header:
    size, kind, width, height, bits, colour = struct.unpack_from(">I4sIIBB", data, 8)
    if kind != b"IHDR" or size != 13:
        raise BadRequest(DAMAGED)
    depth = bits * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 1)
    offset, frames, pixels, texts = 33, 1, 0, _Texts()
    for _ in range(MAX_STEPS):
        if offset + 8 > len(data):
            break
        size, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"IDAT":
            pixels += min(size, len(data) - offset)
        elif kind == b"acTL" and struct.unpack_from(">I", data, offset + 8)[0] > 1:
            frames = 2
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            texts.add(size, packed=kind != b"tEXt")
        elif kind == b"IEND":
            break
        offset += 12 + size
    else:
        raise BadRequest(DAMAGED)
    return Header("PNG", width, height, frames, depth, pixels)


def _gif(data: bytes | bytearray) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    frames = 0
    steps = iter(range(len(data) // 255 + MAX_STEPS))
    while frames < 2 and offset < len(data):
        kind = data[offset]
        if kind == 0x2C:
            frames += 1
            if frames == 1:
                left, top, w, h, flags = struct.unpack_from("<HHHHB", data, offset + 1)
                # Decoders widen the canvas to hold a first frame that is larger.
                width, height = max(width, left + w), max(height, top + h)
            else:
                break
            offset += 10 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0) + 1
        elif kind == 0x21:
            offset += 2
        else:
            break
        while offset < len(data) and data[offset]:
            offset += 1 + data[offset]
            _count_step(steps)
        offset += 1
        _count_step(steps)
    if not frames:
        raise BadRequest(DAMAGED)
    return Header("GIF", width, height, frames, 8)


def _count_step(steps: Iterator[int]) -> None:
    if next(steps, None) is None:
        raise BadRequest(DAMAGED)


def _webp(data: bytes | bytearray) -> Header:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        if len(data) < 30:
            raise BadRequest(DAMAGED)
        return Header("WEBP", width, height, 2 if data[20] & 2 else 1)
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise BadRequest(DAMAGED)
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("WEBP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = struct.unpack_from("<I", data, 21)[0]
        return Header("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    raise BadRequest(DAMAGED)


def _bmp(data: bytes | bytearray) -> Header:
    size = struct.unpack_from("<I", data, 14)[0]
    if size == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
    elif size in (16, 40, 52, 56, 64, 108, 124):
        width, height, _, depth = struct.unpack_from("<iiHH", data, 18)
    else:
        raise BadRequest(DAMAGED)
    return Header("BMP", width, abs(height), depth=depth)


READERS: tuple[tuple[re.Pattern[bytes], Callable[[bytes | bytearray], Header]], ...] = (
    (re.compile(rb"\xff\xd8\xff"), _jpeg),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), _webp),
    (re.compile(rb"BM"), _bmp),
)
"""First bytes of the files of each format, and the function that reads its header."""
