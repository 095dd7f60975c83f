"""Digit masks in three kinds of type: PIL's own font, seven segments and pen strokes."""

from __future__ import annotations

from functools import cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

_TALL = 96
_SEGMENTS = {
    "0": "abcdef",
    "1": "bc",
    "2": "abged",
    "3": "abgcd",
    "4": "fgbc",
    "5": "afgcd",
    "6": "afgedc",
    "7": "abc",
    "8": "abcdefg",
    "9": "abcdfg",
}
_ENDS = {
    "a": ((0, 0), (1, 0)), "b": ((1, 0), (1, 1)), "c": ((1, 1), (1, 2)), "d": ((0, 2), (1, 2)),
    "e": ((0, 1), (0, 2)), "f": ((0, 0), (0, 1)), "g": ((0, 1), (1, 1)),
}  # fmt: skip
# pen strokes on a box of 1 by 2
_STROKES: dict[str, list[list[tuple[float, float]]]] = {
    "0": [[(0.5, 0), (0.1, 0.35), (0, 1), (0.1, 1.65), (0.5, 2), (0.9, 1.65), (1, 1), (0.9, 0.35), (0.5, 0)]],
    "1": [[(0.15, 0.4), (0.6, 0), (0.6, 2)]],
    "2": [[(0, 0.45), (0.2, 0.1), (0.5, 0), (0.85, 0.15), (0.95, 0.55), (0.75, 1), (0, 2), (1, 2)]],
    "3": [[(0.05, 0.2), (0.4, 0), (0.85, 0.15), (0.9, 0.6), (0.45, 0.95), (0.9, 1.2), (1, 1.6), (0.6, 2), (0, 1.8)]],
    "4": [[(0.75, 2), (0.75, 0), (0, 1.35), (1, 1.35)]],
    "5": [[(0.95, 0), (0.15, 0), (0.08, 0.85), (0.5, 0.75), (0.95, 1), (1, 1.5), (0.65, 1.95), (0.2, 2), (0, 1.8)]],
    "6": [[(0.85, 0.1), (0.5, 0.05), (0.15, 0.5), (0, 1.3), (0.2, 1.9), (0.6, 2), (0.95, 1.7), (0.95, 1.25),
           (0.6, 1), (0.2, 1.1), (0.02, 1.4)]],
    "7": [[(0, 0), (1, 0), (0.4, 2)]],
    "8": [[(0.5, 0.95), (0.1, 0.6), (0.2, 0.12), (0.5, 0), (0.8, 0.12), (0.9, 0.6), (0.5, 0.95), (0.05, 1.35),
           (0.12, 1.85), (0.5, 2), (0.88, 1.85), (0.95, 1.35), (0.5, 0.95)]],
    "9": [[(0.98, 0.6), (0.8, 0.9), (0.4, 1), (0.05, 0.75), (0.05, 0.3), (0.4, 0), (0.8, 0.1), (1, 0.6),
           (0.85, 1.5), (0.5, 1.95), (0.15, 1.9)]],
}  # fmt: skip
STYLES: tuple[str, ...] = ("font", "font", "bold", "bold", "segment", "stroke", "thick")


@cache
def glyph(digit: str, style: str) -> Image.Image:
    """The mask of one digit, cut to its ink, 96 pixels tall before cutting."""
    if style in ("font", "bold"):
        font = ImageFont.load_default(_TALL)
        out = Image.new("L", (_TALL, _TALL * 2))
        pen = 5 if style == "bold" else 0
        ImageDraw.Draw(out).text((_TALL // 2, _TALL), digit, fill=255, font=font, anchor="mm", stroke_width=pen)
    else:
        width = {"segment": 11, "stroke": 9, "thick": 16}[style]
        lines = [list(_ENDS[s]) for s in _SEGMENTS[digit]] if style == "segment" else _STROKES[digit]
        out = Image.new("L", (_TALL, _TALL + 2 * width))
        draw = ImageDraw.Draw(out)
        for line in lines:
            points = [(width + x * 44, width + y * 44) for x, y in line]
            draw.line(points, fill=255, width=width, joint="curve")
            for x, y in (points[0], points[-1]):
                draw.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=255)
    box = out.getbbox()
    assert box is not None
    return out.crop(box)


def place(number: str, size: tuple[int, int], rng: Random) -> list[tuple[Image.Image, tuple[int, int]]]:
    """Masks of the digits of a number and their left upper corners, laid out in one line inside the image."""
    style = rng.choice(STYLES)
    width, height = size
    glyphs = [glyph(d, style) for d in number]
    tallest = max(g.height for g in glyphs)
    gap = rng.uniform(0.1, 0.28)
    stretch = rng.uniform(0.85, 1.2)
    # widths in units of the line's height
    widths = [g.width / tallest * stretch for g in glyphs]
    total = sum(widths) + gap * (len(glyphs) - 1)
    most = min(height * 0.92, width * 0.92 / total)
    least = min(most, 38.0)
    line = least + (most - least) * rng.random() ** 0.7
    left = rng.uniform(0.03 * width, max(0.03 * width, 0.97 * width - total * line))
    top = rng.uniform(0.03 * height, max(0.03 * height, 0.97 * height - line))
    out = []
    for g, w in zip(glyphs, widths, strict=True):
        tall = max(4, round(g.height / tallest * line))
        out.append((g.resize((max(3, round(w * line)), tall), Image.Resampling.BILINEAR), (round(left), round(top))))
        left += (w + gap) * line
    return out
