"""Seeded damage to image files: each number is one file, the same on every machine."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image

from tests.hostile.files import encoded


def _saved(image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def whole_files():
    """Honest small files of every kind that is taken."""
    noise = Image.fromarray(np.random.default_rng(2).integers(0, 256, (40, 56, 4), np.uint8))
    rgb = noise.convert("RGB")
    frames = [rgb, rgb.rotate(90), rgb.rotate(180)]
    exif = Image.Exif()
    exif[0x0112] = 6
    several = {"save_all": True, "append_images": frames[1:]}
    return [
        encoded("JPEG"),
        encoded("JPEG", progressive=True),
        _saved(rgb, "JPEG", exif=exif),
        _saved(rgb.convert("CMYK"), "JPEG"),
        _saved(rgb.convert("L"), "JPEG"),
        encoded("PNG"),
        _saved(noise, "PNG", exif=exif),
        _saved(rgb.quantize(16), "PNG"),
        _saved(Image.fromarray(np.arange(2240, dtype=np.uint16).reshape(40, 56)), "PNG"),
        _saved(rgb.convert("1"), "PNG"),
        _saved(rgb, "PNG", **several),
        encoded("WEBP"),
        encoded("WEBP", lossless=True),
        _saved(noise, "WEBP", exif=exif),
        _saved(rgb, "WEBP", **several),
        encoded("GIF"),
        _saved(rgb, "GIF", **several),
        encoded("BMP"),
        _saved(rgb.quantize(16), "BMP"),
    ]


WHOLE = whole_files()


def mutated(number: int) -> bytes:
    """File ``number``: flipped, cut, repeated, spliced and overwritten bytes of one of the honest files."""
    rng = random.Random(number)
    data = bytearray(WHOLE[number % len(WHOLE)])
    for _ in range(rng.choice((1, 1, 2, 4, 8, 30))):
        # Structures stand in front; damage only to pixels would be dull.
        at = rng.randrange(min(len(data), rng.choice((32, 64, 200, 1 << 30)))) if data else 0
        match rng.randrange(8):
            case 0 | 1 | 2:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                data[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))])
            case 4:
                data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\1"))
            case 5:
                del data[at : at + rng.choice((1, 2, 7, 300))]
            case 6:
                data[at:at] = data[at : at + rng.choice((1, 4, 50))] * rng.choice((1, 2, 20))
            case 7:
                other = WHOLE[rng.randrange(len(WHOLE))]
                where = rng.randrange(len(other))
                data[at : at + 40] = other[where : where + 40]
    if rng.random() < 0.15:
        del data[rng.randrange(len(data) + 1) :]
    return bytes(data)
