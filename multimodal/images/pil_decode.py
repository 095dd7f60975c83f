"""Decodes inspected bytes to an upright RGB image. Runs in decode workers (``multimodal/images/pil_decode.py``).

The decode worker's job for images: decode, resize, cut into patches. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from threading import Lock

# Importing these five registers them; no other format is ever tried.
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from trencadis.core.errors import BadRequest, TooLarge, TrencadisError
from trencadis.multimodal.convert_to_rgb import to_rgb
from trencadis.multimodal.decode_workers.worker_main import Values
from trencadis.multimodal.images.image_header import DAMAGED, MAX_IMAGE_PIXELS, Header, check_size, inspect_header
from trencadis.multimodal.processor_interface import build_processor

__all__ = ["decode", "load_pil_image", "to_rgb"]

PLUGINS = (BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
DRAFT_PIXELS = 64
DRAFT_GAP = 4
TOO_LARGE = "The image is too large to decode."
TOO_LARGE_ERRORS = (MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning)
_LOAD_LOCK = Lock()
"""Held while a lazily opened image loads: a caller may pass one twice, and loading is not thread-safe."""


def decode(data: bytes | bytearray, header: Header, shrink: int = 1) -> Image.Image:
    """Decodes the first frame of ``data`` to an upright RGB image.

    Args:
        data: a whole file that ``inspect_header`` accepted.
        header: the result of ``inspect_header``.
        shrink: 1, or for JPEG 2, 4 or 8: decode at that fraction of both sides, rounded up.

    Raises:
        BadRequest: truncated, damaged, or not of the size that ``header`` states; the message never quotes the decoder.
        TooLarge: out of memory, or above Pillow's own limit.
    """
    with decoder_errors(), Image.open(BytesIO(data), formats=(header.format,)) as image:
        if image.size != (header.width, header.height):
            raise BadRequest(DAMAGED)
        if shrink > 1:
            image.draft(None, (header.width // shrink, header.height // shrink))
        image.load()
        return to_rgb(image)


def jpeg_shrink(header: Header, height: int, width: int) -> int:
    """Returns the factor by which the decoder shrinks a JPEG image to be resized to ``height`` x ``width``: 1, 2, 4 or
    8.

    The reference uses only bicubic resizing, so only images with at least ``DRAFT_PIXELS`` times the target's pixels
    are shrunk, and their sides stay at least ``DRAFT_GAP`` times the target's. Pixels then differ from the reference by
    0.3 of 255 on average and 10 at most (noisy photographs with lettering).
    """
    if header.format != "JPEG" or header.width * header.height < DRAFT_PIXELS * height * width:
        return 1
    long, short = max(header.width, header.height), min(header.width, header.height)
    gap = min(long / max(height, width), short / min(height, width))
    return next((s for s in (8, 4, 2) if gap >= s * DRAFT_GAP), 1)


def load_pil_image(image: Image.Image, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Loads a caller's PIL image as upright RGB.

    Raises:
        BadRequest: the image cannot be loaded, or its sides or aspect ratio are refused (see ``check_size``).
        TooLarge: more than ``max_pixels`` pixels, or out of memory.
    """
    check_size(image.width, image.height, max_pixels)
    with decoder_errors():
        with _LOAD_LOCK:
            image.load()
        return to_rgb(image)


@contextmanager
def decoder_errors() -> Iterator[None]:
    """Converts any exception of a decoder to BadRequest or TooLarge, without the decoder's message."""
    try:
        yield
    except TrencadisError:
        raise
    except Exception as error:
        # Decoders raise about ten exception types on hostile bytes, and their texts leak addresses.
        raise TooLarge(TOO_LARGE) if isinstance(error, TOO_LARGE_ERRORS) else BadRequest(DAMAGED) from None


def prepare_image(data: bytearray, options: Values) -> tuple[Values, Sequence[memoryview]]:
    """Decodes an image's first frame, resizes it and cuts it into patches.

    Args:
        data: a whole file.
        options: ``max_pixels``, a limit for the file; ``processor``, the fields of a Processor.

    Returns:
        ``resized`` and ``original``, (height, width) of the upright image in pixels, and ``resize_seconds``; and one
        buffer, uint8 [patches, patch values].

    Raises:
        TrencadisError: see ``inspect_header``, ``decode`` and ``Processor.prepare``.
    """
    processor = build_processor(options["processor"])
    header = inspect_header(data, options["max_pixels"])
    shrink = jpeg_shrink(header, *processor.compute_geometry(header.height, header.width).resized)
    image = decode(data, header, shrink)
    original = (image.height, image.width)
    if shrink > 1:
        rotated = image.size != (-(-header.width // shrink), -(-header.height // shrink))
        original = (header.width, header.height) if rotated else (header.height, header.width)
    begun = time.perf_counter()
    made = processor.prepare(image, "", original)
    values = {"resized": made.resized, "original": original, "resize_seconds": time.perf_counter() - begun}
    return values, [made.pixels.data.cast("B")]
