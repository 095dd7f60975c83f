"""Spans of images and videos in a prompt: which tokens use which rows of the image arena, and its reserved rows.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

ZERO_ROW, SINK_ROW = 0, 1
"""Rows of the image arena that hold no image: ZERO is read by padding and never written, SINK is written by padding and
never read. In ``image_row``, row 0 means the token's own embedding.
"""

RESERVED_ROWS = 2


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
