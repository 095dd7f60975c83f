"""Pictures that tokens attend to instead of taking rows of them: what a Step and a launch say of them. Torch-free.

Some decoders have layers that attend to the rows of pictures (``TextConfig.cross``). Such a picture takes one unit of
the image arena, all of equal length, whose first rows are those of what the picture shows; behind them stand rows of
what it leaves empty. A launch names the units that its tokens see, and how far each token sees into each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VARIANT = "pictures"
"""Text buckets of launches that see have this variant, and behind it how many units."""

GROWTH = 4
"""Launches are planned for so many times as many units as the ones below."""

ENDLESS = 1 << 30
"""Length of the span of a picture that is seen: all tokens of its request need it, those that it draws too."""


class SeenPicture(NamedTuple):
    """Tokens [start, stop) of a chunk attend to the first ``rows`` rows of unit number ``unit`` of the arena."""

    start: int
    stop: int
    unit: int
    rows: int


class Sight(NamedTuple):
    """What a chunk's tokens see; the first ``silent`` ones stand before every picture, and so their MLP is left out."""

    pictures: tuple[SeenPicture, ...] = ()
    silent: int = 0

    def part(self, start: int, stop: int) -> Sight:
        """That of the tokens [start, stop)."""
        cut = (
            SeenPicture(max(p.start, start) - start, min(p.stop, stop) - start, p.unit, p.rows)
            for p in self.pictures
            if p.start < stop and p.stop > start
        )
        return Sight(tuple(cut), min(max(self.silent - start, 0), stop - start))

    @property
    def units(self) -> set[int]:
        """The units that it names."""
        return {p.unit for p in self.pictures}


BLIND = Sight()
"""Of a row without pictures."""


@dataclass(slots=True)
class SeenInputs:
    """Host arrays of a launch of n tokens that see u units."""

    units: NDArray[np.int32]  # [u]
    reach: NDArray[np.int32]  # [n, u] rows of each unit that a token sees; 0: none
    times: NDArray[np.int32]  # [n, u] how often it sees them: equal pictures are one unit
    gate: NDArray[np.int32]  # [n] 0: its layers that see add nothing; 1: their attention alone does; 2: their MLP too

    def behind(self, count: int) -> SeenInputs:
        """The same, with ``count`` tokens before that see nothing."""
        return self.padded(count + len(self.gate), len(self.units), count + np.arange(len(self.gate)))

    def padded(self, tokens: int, units: int, place: NDArray[np.int64] | None = None) -> SeenInputs:
        """For a launch of ``tokens`` tokens and ``units`` units: what is added sees nothing, and reads unit 0.

        ``place``: int64 [n], where each token stands; None: in order.
        """
        at: Any = slice(len(self.gate)) if place is None else place
        n = len(self.units)
        made = no_sight(tokens, units)
        made.units[:n] = self.units
        made.reach[at, :n], made.times[at, :n], made.gate[at] = self.reach, self.times, self.gate
        return made


def no_sight(tokens: int, units: int) -> SeenInputs:
    """Inputs of padding alone."""
    reach, times = np.zeros((tokens, units), np.int32), np.zeros((tokens, units), np.int32)
    return SeenInputs(np.zeros(units, np.int32), reach, times, np.zeros(tokens, np.int32))


def units_of(sights: Iterable[Sight]) -> int:
    """Units that a launch of these rows sees."""
    return len(set[int]().union(*(sight.units for sight in sights)))


def seen_inputs(sights: Sequence[Sight], lengths: Sequence[int]) -> SeenInputs | None:
    """Inputs of a launch of rows, one after the other; None where none sees anything."""
    units = sorted(set[int]().union(*(sight.units for sight in sights)))
    if not units:
        return None
    made, column = no_sight(sum(lengths), len(units)), {unit: i for i, unit in enumerate(units)}
    made.units[:] = units
    first = 0
    for sight, length in zip(sights, lengths, strict=True):
        for p in sight.pictures:
            here = slice(first + p.start, first + p.stop)
            made.reach[here, column[p.unit]] = p.rows
            made.times[here, column[p.unit]] += 1
            made.gate[here] = 2
        made.gate[first : first + sight.silent] = 1 if sight.pictures else 0
        first += length
    return made


def variant_of(need: int, most: int = 0) -> str:
    """The variant of a text launch that sees ``need`` units; ``most``: units of the arena, 0: not known."""
    return f"{VARIANT}{next(s for s in sizes(max(need, most)) if s >= need)}" if need else ""


def sizes(most: int) -> tuple[int, ...]:
    """Units that launches are planned for, ascending."""
    found = [1]
    while found[-1] < most:
        found.append(found[-1] * GROWTH)
    return (*found[:-1], most) if most > 1 else (1,)


def planned_units(variant: str) -> int:
    """Units of a text bucket's launches."""
    return int(variant.removeprefix(VARIANT)) if variant.startswith(VARIANT) else 0
