"""Determines which tokens attend to which images of their request. Pure.

The masks are those of the model authors' code: adjacent images form a group. A token attends to the images of the last
group at or before its position; tokens inside the group attend to its images up to their own position. Tokens before
the first image attend to all rows of all images, including rows that an image leaves empty, and skip the MLP of the
cross-attention layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.core.kv.media_spans import MediaSpan
from trencadis.core.shapes.cross_attention_inputs import ENDLESS, CrossAttentionSpan, CrossAttentionSpans
from trencadis.core.shared_constants import RESERVED_ROWS


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
