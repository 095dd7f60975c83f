"""Cross-attention to images: which images the tokens of a Step attend to, and the host arrays of a launch.

Torch-free. Some decoders have layers that attend to image rows (``TextConfig.cross_attention_layers``). Such an image
takes one unit of the image arena. All units have equal length; the first rows hold the image's content, the rest are
unused. A launch lists the units that its tokens attend to, and how many rows of each.

The masks are those of the model authors' code: adjacent images form a group. A token attends to the images of the last
group at or before its position; tokens inside the group attend to its images up to their own position. Tokens before
the first image attend to all rows of all images, including rows that an image leaves empty, and skip the MLP of the
cross-attention layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trencadis.core.media_spans import RESERVED_ROWS, MediaSpan

VARIANT = "pictures"
"""Text buckets of launches with cross-attention have this variant, followed by the number of units."""

GROWTH = 4
"""Ratio of consecutive numbers of units that launches are planned for."""

ENDLESS = 1 << 30
"""Length of the span of an image for cross-attention: all tokens of its request need it, including generated ones."""


class CrossAttentionSpan(NamedTuple):
    """Tokens [start, stop) of a chunk attend to the first ``rows`` rows of unit ``unit`` of the arena."""

    start: int
    stop: int
    unit: int
    rows: int


class CrossAttentionSpans(NamedTuple):
    """The images that the tokens of a chunk attend to.

    The first ``silent`` tokens precede every image and skip the MLP of cross-attention layers.
    """

    images: tuple[CrossAttentionSpan, ...] = ()
    silent: int = 0

    def restrict(self, start: int, stop: int) -> CrossAttentionSpans:
        """Returns the spans restricted to tokens [start, stop)."""
        cut = (
            CrossAttentionSpan(max(p.start, start) - start, min(p.stop, stop) - start, p.unit, p.rows)
            for p in self.images
            if p.start < stop and p.stop > start
        )
        return CrossAttentionSpans(tuple(cut), min(max(self.silent - start, 0), stop - start))

    @property
    def units(self) -> set[int]:
        """The units that the spans refer to."""
        return {p.unit for p in self.images}


NO_CROSS_ATTENTION = CrossAttentionSpans()
"""The value for a row without images."""


@dataclass(slots=True)
class CrossAttentionInputs:
    """Host arrays of a launch of n tokens that attend to u units."""

    units: NDArray[np.int32]  # [u]
    reach: NDArray[np.int32]  # [n, u] rows of each unit that a token attends to; 0: none
    times: NDArray[np.int32]  # [n, u] how many times it attends to them: equal images share a unit
    gate: NDArray[
        np.int32
    ]  # [n] 0: cross-attention layers add nothing; 1: only their attention does; 2: their MLP, too

    def shifted(self, count: int) -> CrossAttentionInputs:
        """Returns the inputs shifted by ``count`` leading tokens that attend to no image."""
        return self.padded(count + len(self.gate), len(self.units), count + np.arange(len(self.gate)))

    def padded(self, tokens: int, units: int, positions: NDArray[np.int64] | None = None) -> CrossAttentionInputs:
        """Returns the inputs padded to ``tokens`` tokens and ``units`` images; padding attends to nothing.

        ``positions``: int64 [n], the index of each token in the padded arrays; None: in order.
        """
        at: Any = slice(len(self.gate)) if positions is None else positions
        n = len(self.units)
        made = padding_inputs(tokens, units)
        made.units[:n] = self.units
        made.reach[at, :n], made.times[at, :n], made.gate[at] = self.reach, self.times, self.gate
        return made


def padding_inputs(tokens: int, units: int) -> CrossAttentionInputs:
    """Returns inputs that consist only of padding."""
    reach, times = np.zeros((tokens, units), np.int32), np.zeros((tokens, units), np.int32)
    return CrossAttentionInputs(np.zeros(units, np.int32), reach, times, np.zeros(tokens, np.int32))


def count_units(rows: Iterable[CrossAttentionSpans]) -> int:
    """Returns the number of units that a launch of these rows attends to."""
    return len(set[int]().union(*(spans.units for spans in rows)))


def make_cross_attention_inputs(
    rows: Sequence[CrossAttentionSpans], lengths: Sequence[int]
) -> CrossAttentionInputs | None:
    """Builds the inputs of a launch of concatenated rows; None if no row attends to an image."""
    units = sorted(set[int]().union(*(spans.units for spans in rows)))
    if not units:
        return None
    made, column = padding_inputs(sum(lengths), len(units)), {unit: i for i, unit in enumerate(units)}
    made.units[:] = units
    first = 0
    for spans, length in zip(rows, lengths, strict=True):
        for p in spans.images:
            here = slice(first + p.start, first + p.stop)
            made.reach[here, column[p.unit]] = p.rows
            made.times[here, column[p.unit]] += 1
            made.gate[here] = 2
        made.gate[first : first + spans.silent] = 1 if spans.images else 0
        first += length
    return made


def variant_of(need: int, most: int = 0) -> str:
    """Returns the variant of a text launch that attends to ``need`` units; ``most``: units of the arena, 0: unknown."""
    return f"{VARIANT}{next(s for s in planned_unit_counts(max(need, most)) if s >= need)}" if need else ""


def planned_unit_counts(most: int) -> tuple[int, ...]:
    """Returns the numbers of units that launches are planned for, ascending."""
    found = [1]
    while found[-1] < most:
        found.append(found[-1] * GROWTH)
    return (*found[:-1], most) if most > 1 else (1,)


def planned_units(variant: str) -> int:
    """Returns the number of units in a text bucket's variant."""
    return int(variant.removeprefix(VARIANT)) if variant.startswith(VARIANT) else 0


def attention_ends(positions: Sequence[int]) -> list[int]:
    """Returns, for each image position (ascending), the end (exclusive) of the tokens that attend to it."""
    found = [ENDLESS] * len(positions)
    for i in reversed(range(len(positions) - 1)):
        found[i] = found[i + 1] if positions[i] + 1 == positions[i + 1] else positions[i + 1]
    return found


def compute_cross_attention(
    spans: Sequence[MediaSpan], first: Sequence[int], start: int, stop: int
) -> CrossAttentionSpans:
    """Returns which images tokens [start, stop) of a request attend to."""
    positions = [span.runs[0].offset for span in spans]
    silent = min(max(positions[0] - start, 0), stop - start)
    units = [(row - RESERVED_ROWS) // span.arena_rows for span, row in zip(spans, first, strict=True)]
    found = [
        CrossAttentionSpan(0, silent, unit, span.arena_rows) for span, unit in zip(spans, units, strict=True) if silent
    ]
    for span, unit, position, end in zip(spans, units, positions, attention_ends(positions), strict=True):
        if position < stop and end > start:
            found.append(
                CrossAttentionSpan(
                    max(position, start) - start, min(end, stop) - start, unit, span.cross_attention_rows
                )
            )
    return CrossAttentionSpans(tuple(found), silent)
