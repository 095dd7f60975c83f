"""``trencadis plan --plot``: draws every need of a stage, coloured by its padding. Pillow only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.errors import StartupError
from trencadis.core.shapes.rectangular_launches import RowNeed, split_rows
from trencadis.core.shapes.shape_limits import ShapeLimits
from trencadis.server.plan.trace_plan_comparison import StepNeeds

WIDTH, HEIGHT = 960, 640
LEFT, TOP, RIGHT, BOTTOM = 90, 50, 150, 60
STEP = 4
"""Size of one sample in pixels."""
DOTS = 4000
"""Approximate number of needs of a trace that are drawn."""

Cell = tuple[int, int]


def draw(plan: Plan, limits: ShapeLimits, path: str, by_blocks: bool, needs: Sequence[StepNeeds] = ()) -> None:
    """Writes the image: tokens x context of one row, or rows x blocks of a decode launch, both axes logarithmic.

    ``needs`` are drawn as dots.

    Raises:
        StartupError: the device pads nothing, or the file cannot be written.
    """
    if plan.policy.mixed or not plan.buckets:
        raise StartupError("--plot shows planned rectangles; this device has none.")
    if by_blocks:
        axes = ("rows", limits.max_rows), ("blocks", max(plan.sizes(Stage.DECODE, 1)))
        cost = _make_decode_cost(plan, limits)
    else:
        axes = ("tokens", limits.chunk), ("context + 1", limits.max_model_len)
        cost = _make_prompt_cost(plan, limits)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    for x in range(0, across, STEP):
        for y in range(0, up, STEP):
            need = _to_size(x, across, axes[0][1]), _to_size(y, up, axes[1][1])
            colour = _get_colour(cost(need))
            pen.rectangle((LEFT + x, TOP + up - y - STEP, LEFT + x + STEP - 1, TOP + up - y - 1), fill=colour)
    for x_need, y_need in _select_points(needs, plan.block_size, by_blocks):
        x, y = LEFT + _to_pixel(x_need, across, axes[0][1]), TOP + up - _to_pixel(y_need, up, axes[1][1])
        pen.rectangle((x - 1, y - 1, x, y), fill=(30, 30, 60))
    _draw_frame(pen, axes, across, up)
    title = "decode launches" if by_blocks else "prompt launches of one row"
    pen.text((LEFT, 16), f"{title}: {len(plan.buckets)} buckets; colour: cost run / cost needed", fill="black")
    try:
        image.save(path)
    except (OSError, ValueError) as error:
        raise StartupError(f"--plot {path}: {error}.") from None


def _to_size(pixel: int, extent: int, largest: int) -> int:
    """Returns the size at a pixel of a logarithmic axis from 1 to ``largest``."""
    return max(round(math.exp(math.log(largest) * pixel / extent)), 1)


def _to_pixel(size: int, extent: int, largest: int) -> int:
    """Returns the pixel of a size; the inverse of ``_to_size``."""
    return round(extent * math.log(max(size, 1)) / math.log(max(largest, 2)))


def _select_points(needs: Sequence[StepNeeds], block_size: int, by_blocks: bool) -> list[Cell]:
    """Returns some needs of a trace, evenly selected."""
    points: list[Cell] = []
    for step in needs:
        if by_blocks:
            listed = [n.context // block_size + 1 for n in step.rows if n.tokens == 1]
            points += [(len(listed), sum(listed))] if listed else []
        else:
            points += [(n.tokens, n.context + 1) for n in step.rows if n.tokens > 1]
    return points[:: max(len(points) // DOTS, 1)]


def _make_prompt_cost(plan: Plan, limits: ShapeLimits) -> Callable[[Cell], float]:
    cost = plan.policy.cost

    def ratio(need: Cell) -> float:
        tokens, context = need[0], need[1] - 1
        if tokens + context > limits.max_model_len:
            return 0.0
        if tokens == 1:
            real = Bucket(Stage.DECODE, (1, context // plan.block_size + 1))
        elif context:
            real = Bucket(Stage.CONTEXT, (tokens, -(-context // plan.block_size)))
        else:
            real = Bucket(Stage.FRESH, (1, tokens))
        return sum(cost(c.bucket) for c in split_rows([RowNeed(0, context, tokens)], plan)) / cost(real)

    return ratio


def _make_decode_cost(plan: Plan, limits: ShapeLimits) -> Callable[[Cell], float]:
    cost = plan.policy.cost

    def ratio(need: Cell) -> float:
        found = plan.find(Stage.DECODE, need)
        if found is None or not limits.decode(*need):
            return 0.0
        return cost(found) / cost(Bucket(Stage.DECODE, need))

    return ratio


class _Colour(NamedTuple):
    """A colour; each part is 0 to 255."""

    red: int
    green: int
    blue: int


def _get_colour(ratio: float) -> _Colour:
    """Returns grey for needs that cannot occur; else from green (no padding) over yellow to red (at least twice the
    cost).
    """
    if ratio <= 0:
        return _Colour(225, 225, 225)
    share = min(max(ratio - 1, 0.0), 1.0)
    return _Colour(round(60 + 195 * min(2 * share, 1)), round(190 - 150 * max(2 * share - 1, 0)), 70)


def _draw_frame(pen: ImageDraw.ImageDraw, axes: tuple[tuple[str, int], tuple[str, int]], across: int, up: int) -> None:
    """Draws ticks at powers of four, names of the axes, and the scale of colours."""
    for (_, largest), extent, horizontal in zip(axes, (across, up), (True, False), strict=True):
        size = 1
        while size <= largest:
            at = _to_pixel(size, extent, largest)
            pixel = (LEFT + at, TOP + up + 6) if horizontal else (LEFT - 52, TOP + up - at - 6)
            pen.text(pixel, str(size), fill="black")
            size *= 4
    pen.text((LEFT + across // 2, HEIGHT - 24), axes[0][0], fill="black")
    pen.text((6, TOP + up // 2), axes[1][0], fill="black")
    for i, ratio in enumerate((0.0, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0)):
        y = TOP + 24 * i
        pen.rectangle((WIDTH - RIGHT + 24, y, WIDTH - RIGHT + 44, y + 16), fill=_get_colour(ratio))
        label = "cannot occur" if not ratio else f"{ratio:g}{' and more' if ratio == 2 else ''}"
        pen.text((WIDTH - RIGHT + 52, y + 2), label, fill="black")
