"""Draws docs/figures/*.svg: windows, slots and buckets, laid out by the code that runs.

python -P tools/draw_images.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trencadis.core.bucket_lookup import Plan  # noqa: E402
from trencadis.core.buckets import DEFAULT_VISION_SLOTS, Stage  # noqa: E402
from trencadis.core.device_shape_policy import Policy  # noqa: E402
from trencadis.core.scheduling.encoder_scheduler import ImagePacker  # noqa: E402
from trencadis.multimodal.patch_packing import count_slots, patch_grid  # noqa: E402
from trencadis.multimodal.qwen2_5_vl.window_packing import window_layout  # noqa: E402
from trencadis.multimodal.qwen2_vl.smart_resize import smart_resize  # noqa: E402

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
EMPTY, INK = "#e8e8e8", "#222"
PLAN = Plan(
    Policy({Stage.VISION: ("slots",)}, {Stage.VISION: (64,)}, {Stage.VISION: (DEFAULT_VISION_SLOTS,)}, captures=True)
)

Shape = str


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = "white", width: float = 0.5) -> Shape:
    """A rectangle as an SVG shape."""
    place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="{width:g}"/>'


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> Shape:
    """One line of text as an SVG shape."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{words}</text>'


def svg(width: int, height: int, shapes: Iterator[Shape]) -> str:
    """The text of an SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, box(0, 0, width, height, "white"), *shapes, "</svg>"]) + "\n"


def windows(h: int = 18, w: int = 22) -> str:
    """An image's patches, coloured by attention window."""
    side = 14

    def shapes() -> Iterator[Shape]:
        yield text(10, 20, f"{w * 14} x {h * 14} pixels = {w} x {h} patches of 14 pixels; windows of 8 x 8 patches")
        for row in range(h):
            for column in range(w):
                window = row // 8 * -(-w // 8) + column // 8
                yield box(10 + column * side, 32 + row * side, side, side, COLOURS[window % len(COLOURS)])
        for row in range(0, h, 2):
            for column in range(0, w, 2):
                yield box(10 + column * side, 32 + row * side, 2 * side, 2 * side, "none", "white", 1.6)
        yield text(10, 52 + h * side, "thick lines: cells of 2 x 2 patches, one token of the language model each", 11)

    return svg(20 + max(w * side, 430), 62 + h * side, shapes())


def slots(h: int = 18, w: int = 22) -> str:
    """The same windows as 64 slots each: real patches first, then padding."""
    layout, side = window_layout(h, w), 7

    def shapes() -> Iterator[Shape]:
        need = count_slots((1, h, w))
        yield text(10, 20, f"{h * w} patches in {len(layout.count)} windows of 64 slots = {need} slots; grey: padding")
        for window, count in enumerate(layout.count.tolist()):
            y = 32 + window * 16
            for slot in range(64):
                fill = COLOURS[window % len(COLOURS)] if slot < count else EMPTY
                yield box(10 + slot * side, y, side, 11, fill)
            yield text(16 + 64 * side, y + 10, f"{count}", 10)

    return svg(60 + 64 * side, 40 + 16 * len(layout.count), shapes())


WAITING = ((1280, 720), (224, 224), (640, 480), (1024, 768), (448, 448), (224, 224), (800, 600), (512, 512))


def buckets() -> str:
    """How the packer puts images of several requests into launches."""
    needs = [(f"{w}x{h}", count_slots(patch_grid(*smart_resize(h, w)))) for w, h in WAITING]
    scale = 640 / max(DEFAULT_VISION_SLOTS)
    launches: list[tuple[int, list[int]]] = []
    left = list(range(len(needs)))
    while left:
        chosen = [left[i] for i in ImagePacker(PLAN).choose([needs[i][1] for i in left])]
        launches.append((PLAN.fit(Stage.VISION, (sum(needs[i][1] for i in chosen),)).dims[0], chosen))
        left = [i for i in left if i not in chosen]

    def shapes() -> Iterator[Shape]:
        yield text(10, 20, "waiting, the oldest first: " + ", ".join(f"{n} ({s})" for n, s in needs), 9)
        for i, (bucket, chosen) in enumerate(launches):
            y, x, used = 36 + i * 62, 10.0, sum(needs[j][1] for j in chosen)
            yield text(10, y + 10, f"launch {i + 1}: {used} of {bucket} slots, {100 * used // bucket} % used", 11)
            yield box(10, y + 16, bucket * scale, 26, EMPTY, INK, 1)
            for j in chosen:
                yield box(x, y + 16, needs[j][1] * scale, 26, COLOURS[j % len(COLOURS)])
                if needs[j][1] > 1000:
                    yield text(x + needs[j][1] * scale / 2, y + 33, needs[j][0], 9, "middle")
                x += needs[j][1] * scale

    return svg(660, 40 + 62 * len(launches), shapes())


FIGURES = {"windows": windows, "slots": slots, "buckets": buckets}


def main() -> None:
    """Writes every figure."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
