"""Converts images of any mode that Pillow reads to upright RGB, for decode workers and processors. Torch-free."""

from __future__ import annotations

import numpy as np
from PIL import Image

from trencadis.core.errors import BadRequest

WHITE = (255, 255, 255, 255)
"""Background color of transparent pixels."""

ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held."""

TRANSPOSE_BY_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns an upright RGB image: applies EXIF orientation, composites transparency on white, scales 16 bits to 8.

    The result is a new image, or ``image`` itself if there is nothing to do.

    Raises:
        BadRequest: the mode cannot be converted to RGB.
    """
    transpose = TRANSPOSE_BY_ORIENTATION.get(_orientation(image))
    try:
        opaque = image.mode == "RGB" and image.info.get("transparency") is None
        out = image if opaque else _flatten(image)
    except (ValueError, OSError):
        raise BadRequest("The image's colour mode is not supported.") from None
    return out if transpose is None else _transpose(out, transpose)


def _transpose(image: Image.Image, transpose: Image.Transpose) -> Image.Image:
    out = image.transpose(transpose)
    # The copy inherits the EXIF bytes; a second pass would rotate it again.
    out.info = {}
    return out


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        # Orientation is optional: damaged EXIF data must not make the image fail.
        return 1


def _flatten(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _convert_16_bit(image)
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")
    return image.convert("RGB")


def _convert_16_bit(image: Image.Image) -> Image.Image:
    """Converts 16-bit grey to RGB: v / 257, rounded; the transparent value, if any, becomes white."""
    wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
    grey = ((wide + 128) // 257).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[wide == clear] = 255
    return Image.fromarray(grey).convert("RGB")
