"""Bar charts as PNG files, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

STEP, LEFT, WIDTH = 22, 380, 1000
BLUE = (58, 110, 165)


def bars(path: Path, title: str, rows: Sequence[tuple[str, float]]) -> None:
    """One bar for each (label, value), the longest at full scale; values stand beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (WIDTH, 60 + STEP * max(len(rows), 1)), "white")
    pen = ImageDraw.Draw(image)
    pen.text((10, 10), title, fill="black")
    full = max((value for _, value in rows), default=0.0) or 1.0
    for i, (label, value) in enumerate(rows):
        y = 40 + i * STEP
        pen.text((10, y), label[:58], fill="black")
        pen.rectangle((LEFT, y, LEFT + int((WIDTH - LEFT - 90) * max(value, 0.0) / full), y + 12), fill=BLUE)
        pen.text((WIDTH - 80, y), f"{value:.3g}", fill="black")
    image.save(path)
