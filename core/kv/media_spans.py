"""Items of images and videos inside a prompt: which tokens take which rows of the image arena. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class TokenRun(NamedTuple):
    """Tokens [offset, offset + length) of a prompt, which take rows [first, first + length) of an item.

    ``constant``: or all of them take this constant row, counted from 0; -1: they do not.
    """

    offset: int
    length: int
    first: int = 0
    constant: int = -1


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where one item lies in a prompt: an image, a tile of one, or a temporal patch of a video.

    Args:
        offset: index of its first placeholder token in the prompt.
        length: tokens from that one to its last one.
        digest: hex digest of what the tower sees of it.
        grid: patches (t, h, w), before any are merged.
        slots: VISION slots it needs, a multiple of 64.
        rows: its arena rows, where they are not ``length``.
        runs: which of the tokens take which rows, by ascending offset; empty: all of them, in order. Between the runs
            of one item there may be text and runs of others.
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
        """Index behind its last token."""
        return self.offset + self.length

    @property
    def arena_rows(self) -> int:
        """Its arena rows."""
        return self.rows or self.length

    def list_runs(self) -> tuple[TokenRun, ...]:
        """Its runs, also where it has only one."""
        return self.runs or (TokenRun(self.offset, self.length),)


def rows_at_once(spans: Iterable[MediaSpan]) -> int:
    """Most arena rows that a token of a prompt needs together: of items whose spans overlap there, equal ones once.

    ``spans`` are by ascending offset.
    """
    most = 0
    open_: list[MediaSpan] = []
    for span in spans:
        open_ = [s for s in open_ if s.end > span.offset]
        open_.append(span)
        most = max(most, sum({s.digest: s.arena_rows for s in open_}.values()))
    return most
