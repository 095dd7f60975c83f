"""Generates sizes along one axis: ``exp``, ``lin`` and ``pad``, and the list for images. Pure Python.

Every generator ends at its maximum, so that the largest need always has a bucket. The strategy ``file`` lists whole
buckets instead (``core/shapes/bucket_options.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from trencadis.core.buckets import DEFAULT_VISION_SLOTS, Density
from trencadis.core.shared_constants import WINDOW_SLOTS, align_up

WIDE_GAP = 1024
"""A gap between two sizes of the default VISION list is wide if it has more slots than this and than half of the
smaller size.
"""

STRATEGIES = ("exp", "lin", "pad", "file")


@dataclass(frozen=True)
class AxisSpan:
    """One axis to fill: sizes from ``minimum`` to ``maximum``, both included.

    Args:
        step: the unit that ``exp`` rounds up to; the increment of ``lin`` and ``pad``.
        density: points per octave of ``exp`` by size; above the last entry it is 1 (powers of two).
        pad_max: ``pad``: largest padding of a need; 0: a quarter of the maximum.
        pad_percent: ``pad``: largest padding of a need in percent of the padded size.
    """

    minimum: int
    step: int
    maximum: int
    density: tuple[Density, ...] = ()
    pad_max: int = 0
    pad_percent: int = 25


def exp(span: AxisSpan) -> tuple[int, ...]:
    """Returns octaves above the minimum, each divided into equal parts: 4, 5, 6, 7, 8, 10 .. at four points per
    octave.
    """
    sizes = []
    octave = span.minimum
    while octave < span.maximum:
        points = next((d.points for d in span.density if octave < d.upto), 1)
        sizes += [octave + octave * i // points for i in range(points)]
        octave *= 2
    return _with_maximum((-(-s // span.step) * span.step if s > span.minimum else s for s in sizes), span)


def lin(span: AxisSpan) -> tuple[int, ...]:
    """Returns the minimum doubled up to the step, then multiples of the step."""
    sizes = []
    size = span.minimum
    while size < span.step:
        sizes.append(size)
        size *= 2
    first = -(-span.minimum // span.step) * span.step
    return _with_maximum((*sizes, *range(first, span.maximum + 1, span.step)), span)


def pad(span: AxisSpan) -> tuple[int, ...]:
    """Returns the sizes of ``lin`` without those whose needs fit into the next one with little padding.

    A size is kept if the next one lies above the last one kept by more than ``pad_percent`` of itself or by more than
    ``pad_max``, or if it is a multiple of ``pad_max``; 0 percent is ``lin``, 50 percent nearly powers of two.
    """
    limit = span.pad_max or max(span.maximum // 4, 1)
    sizes: list[int] = []
    for size in lin(span):
        following = size + span.step
        gap = following - sizes[-1] if sizes else following
        if size <= span.step or 100 * gap > span.pad_percent * following or gap > limit or size % limit == 0:
            sizes.append(size)
    return _with_maximum(sizes, span)


def _with_maximum(sizes: Iterable[int], span: AxisSpan) -> tuple[int, ...]:
    kept = {s for s in sizes if span.minimum <= s < span.maximum}
    return (*sorted(kept), span.maximum)


def thinned(sizes: tuple[int, ...], cost: Callable[[int], float], tolerance: float, coarsest: int) -> tuple[int, ...]:
    """Returns ``sizes`` without those that save too little.

    The smallest need above the last size kept takes the largest size that costs at most ``tolerance`` more than the
    need itself and is at most ``coarsest`` times as large. The maximum is always kept.
    """
    kept: list[int] = []
    need = sizes[0]
    while not kept or kept[-1] < sizes[-1]:
        above = [s for s in sizes if s >= need]
        limit = (1 + tolerance) * cost(need)
        kept.append(max((s for s in above if cost(s) <= limit and s <= coarsest * need), default=above[0]))
        need = kept[-1] + 1
    return tuple(kept)


GENERATORS = {"exp": exp, "lin": lin, "pad": pad}


def sizes(strategy: str, span: AxisSpan) -> tuple[int, ...]:
    """Returns the ascending sizes of ``span``; the last is its maximum."""
    return GENERATORS[strategy](span)


def vision_boundaries(largest: int, windows: bool = True) -> tuple[int, ...]:
    """Returns the default VISION list, continued by factors of 1.5 up to ``largest`` slots.

    Args:
        windows: some layers attend inside windows, so that an image takes whole windows; False: it may need any
            multiple of 64, and wide gaps of the list get a size in the middle.
    """
    sizes = list(DEFAULT_VISION_SLOTS)
    if not windows:
        wide = [(a, b) for a, b in pairwise(sizes) if b - a > WIDE_GAP and 2 * b > 3 * a]
        sizes = sorted([*sizes, *(align_up(isqrt(a * b), WINDOW_SLOTS) for a, b in wide)])
    while sizes[-1] < largest:
        sizes.append(align_up(-(-sizes[-1] * 3 // 2), WINDOW_SLOTS))
    return tuple(sizes)
