"""Draws the needs of a trace and the plans that were compared on it: one HTML file, or one SVG, without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Stage
from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.core.shapes.plan_from_recorded_needs import KEPT_STAGES
from trencadis.core.shapes.shape_need_histogram import NeedHistogram

WIDTH, HEIGHT, MARGIN = 430, 260, 46
COLUMNS = 2
EDGES = ("#c2410c", "#1d4ed8", "#047857")
"""Colours of the bucket edges of the drawn plans."""

STYLE = (
    "body{font:15px sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
    "svg{max-width:100%}"
)

NOTE = (
    "Padded work: linear operations and attended pairs of all launches over those of the real tokens. Time: the "
    "modelled seconds of the launches over those of this plan. Learned plans are chosen by this trace, so that other "
    "traffic costs them more. No sizes of as many graphs compute these launches with less padded work than `at least`; "
    "plans that cut prompts into more launches may. The bound is what any choice of as many of the sizes that were "
    "searched costs at least, time and padding together, over this plan."
)


def write_page(path: str, trace: JsonMapping, needs: NeedHistogram, plans: Mapping[str, Plan]) -> None:
    """Writes the page, or only its drawings if ``path`` ends in ``.svg``.

    Args:
        trace: the comparison (``traffic_trace.compare_plans``).
        plans: the plans whose bucket edges are drawn, at most three.

    Raises:
        StartupError: the file cannot be written.
    """
    drawing = draw_needs(needs, plans)
    text = drawing if path.endswith(".svg") else make_page(trace, drawing)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--report {path}: {error.strerror}.") from None


def make_page(trace: JsonMapping, drawing: str) -> str:
    """Returns the HTML of the page."""
    rows = "".join(map(_make_row, list_plan_figures(trace)))
    heads = ("plan", "graphs", "padded work", "at least", "time", "bound", "launches", "graph memory", "warm-up")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Shapes of a trace</title>'
        f"<style>{STYLE}</style></head><body><h1>Shapes of a trace</h1>"
        f"<p>{trace['requests']} requests, {trace['steps']} steps.</p><table><tr>{head}</tr>{rows}</table>"
        f"<p>{NOTE}</p>{drawing}</body></html>\n"
    )


def list_plan_figures(trace: JsonMapping) -> list[JsonObject]:
    """Returns the figures of each plan: ``padded`` is padded over real work."""
    real = max(trace["real"]["cost"], 1e-9)
    return [{"name": name, "padded": plan["cost"] / real, **plan} for name, plan in trace["plans"].items()]


def _make_row(plan: JsonMapping) -> str:
    bound, held, least = plan.get("bound"), plan.get("graph_bytes"), plan.get("least_padding")
    cells = (
        escape(str(plan["name"])), plan["graphs"], f"{plan['padded']:.3f}",
        "" if least is None else f"{least:.3f}", f"{plan['time']:.3f}",
        "" if bound is None else f"{bound:.3f}", plan["launches"], "" if held is None else f"{held / 2**30:.1f} GiB",
        f"{plan['warmup_seconds'] / 60:.1f} min",
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def draw_needs(needs: NeedHistogram, plans: Mapping[str, Plan]) -> str:
    """Returns an SVG with a drawing of each stage: its needs, and the sizes of each plan's buckets."""
    stages = [key[0] for key in sorted(needs.cells) if not key[1] and key[0] not in KEPT_STAGES and needs.cells[key]]
    rows = max(-(-len(stages) // COLUMNS), 1)
    parts = [_make_legend(list(plans))]
    for i, stage in enumerate(stages):
        x, y = i % COLUMNS * (WIDTH + MARGIN), 30 + i // COLUMNS * (HEIGHT + MARGIN)
        parts.append(f'<g transform="translate({x},{y})">{"".join(_draw_stage(stage, needs, plans))}</g>')
    size = (COLUMNS * (WIDTH + MARGIN), 30 + rows * (HEIGHT + MARGIN))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif"'
    return f'{head} font-size="12">{"".join(parts)}</svg>\n'


def _make_legend(names: Sequence[str]) -> str:
    marks = (
        f'<rect x="{20 + 220 * i}" y="4" width="12" height="12" fill="none" stroke="{colour}"/>'
        f'<text x="{38 + 220 * i}" y="14">{escape(name)}</text>'
        for i, (name, colour) in enumerate(zip(names, EDGES, strict=False))
    )
    return "".join(marks)


def _draw_stage(stage: Stage, needs: NeedHistogram, plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yields the elements of one stage: a heat map where it has two axes, else a histogram."""
    cells = needs.cells[stage, ""]
    two = len(next(iter(cells))) == 2
    policy = next(iter(plans.values())).policy
    axes = policy.axes[stage]
    spans = [max(d[a] for d in cells) for a in range(2 if two else 1)]
    heaviest = max(cells.values())
    yield f'<text x="{MARGIN}" y="12" font-weight="bold">{stage.name}</text>'
    yield f'<rect x="{MARGIN}" y="18" width="{WIDTH - MARGIN}" height="{HEIGHT - 48}" fill="none" stroke="#888"/>'
    for dims, weight in sorted(cells.items()):
        x = _place(dims[0], spans[0], WIDTH - MARGIN) + MARGIN
        if two:
            y = HEIGHT - 30 - _place(dims[1], spans[1], HEIGHT - 48)
            shade = 0.15 + 0.85 * math.sqrt(weight / heaviest)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#111" fill-opacity="{shade:.2f}"/>'
        else:
            high = (HEIGHT - 56) * math.sqrt(weight / heaviest)
            top = HEIGHT - 30 - high
            yield f'<rect x="{x - 1:.1f}" y="{top:.1f}" width="2" height="{high:.1f}" fill="#111"/>'
    for plan, colour in zip(plans.values(), EDGES, strict=False):
        yield from _draw_edges(plan, stage, spans, colour)
    yield f'<text x="{MARGIN}" y="{HEIGHT - 14}">1</text><text x="{WIDTH}" y="{HEIGHT - 14}" text-anchor="end">'
    yield f"{axes[0]} {spans[0]}</text>"
    if two:
        yield f'<text x="{MARGIN - 4}" y="28" text-anchor="end">{axes[1]}</text>'


def _draw_edges(plan: Plan, stage: Stage, spans: Sequence[int], colour: str) -> Iterator[str]:
    """Yields the upper edges of a plan's buckets, as far as the trace needs them."""
    for bucket in plan.of(stage):
        if bucket.variant:
            continue
        x = _place(min(bucket.dims[0], spans[0]), spans[0], WIDTH - MARGIN) + MARGIN
        if len(spans) == 1:
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{HEIGHT - 30}" stroke="{colour}" stroke-opacity=".7"/>'
            continue
        y = HEIGHT - 30 - _place(min(bucket.dims[1], spans[1]), spans[1], HEIGHT - 48)
        yield f'<path d="M{x - 8:.1f} {y:.1f}H{x:.1f}V{y + 8:.1f}" fill="none" stroke="{colour}"/>'


def _place(size: int, most: int, pixels: int) -> float:
    """Returns the place of a size on a logarithmic axis from 1 to ``most``."""
    return pixels * math.log(max(size, 1)) / max(math.log(most), 1e-9) if most > 1 else 0.0
