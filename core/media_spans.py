"""Spans of images and videos in a prompt: which tokens use which rows of the image arena. Torch-free.

Determines which tokens attend to which images of their request.

The masks are those of the model authors' code: adjacent images form a group. A token attends to the images of the last
group at or before its position; tokens inside the group attend to its images up to their own position. Tokens before
the first image attend to all rows of all images, including rows that an image leaves empty, and skip the MLP of the
cross-attention layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.cross_attention_inputs import ENDLESS, CrossAttentionSpan, CrossAttentionSpans
from trencadis.core.shared_constants import RESERVED_ROWS


class TokenRun(NamedTuple):
    """Tokens [offset, offset + length) of a prompt, which use rows [first, first + length) of an item.

    ``constant``: number of the constant row that all of them use instead, counted from 0; -1: none.
    """

    offset: int
    length: int
    first: int = 0
    constant: int = -1


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The position of one item in a prompt: an image, a tile of one, or a temporal patch of a video.

    Args:
        offset: index of its first placeholder token in the prompt.
        length: number of tokens from the first placeholder to the last one.
        digest: hex digest of the tower's input for it.
        grid: patches (t, h, w) before merging.
        slots: VISION slots it needs, a multiple of 64.
        rows: its number of arena rows if that is not ``length``.
        runs: which of the tokens use which rows, by ascending offset; empty: all of them, in order. Text and runs of
            other items may lie between the runs of one item.
        cross_attention_rows: above 0, tokens attend to the item and take no rows. The span is that of its whole
            request then, and its one run the token at its place; tokens from there on attend to its first
            ``cross_attention_rows`` rows.
    """

    offset: int
    length: int
    digest: str
    grid: tuple[int, int, int]
    slots: int
    rows: int = 0
    runs: tuple[TokenRun, ...] = ()
    cross_attention_rows: int = 0

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.offset + self.length

    @property
    def arena_rows(self) -> int:
        """Number of its arena rows."""
        return self.rows or self.length

    def list_runs(self) -> tuple[TokenRun, ...]:
        """Returns its runs, also if there is only the implicit one."""
        return self.runs or (TokenRun(self.offset, self.length),)


def rows_at_once(spans: Iterable[MediaSpan]) -> int:
    """Returns the largest number of arena rows that any token of a prompt needs at the same time.

    The items are those whose spans overlap at the token; equal items count once. ``spans`` are by ascending offset.
    """
    most = 0
    open_: list[MediaSpan] = []
    for span in spans:
        open_ = [s for s in open_ if s.end > span.offset]
        open_.append(span)
        most = max(most, sum({s.digest: s.arena_rows for s in open_}.values()))
    return most


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
