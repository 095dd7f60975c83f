"""Matchers: each follows the tokens of one choice and restricts the ids that may come next. Torch-free; masks are
numpy.

A mask is uint8 [ceil(vocabulary / 8)] in little bit order, as in ``HeadInputs.masks``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

import numpy as np

from trencadis.core.output_constraints import ThinkingBudget
from trencadis.core.step import UInt8


class Matcher(Protocol):
    """Follows the tokens of one choice."""

    def restrict(self, row: UInt8) -> None:
        """Removes from a mask the ids that must not be sampled next."""
        ...

    def accept(self, token: int) -> bool:
        """Advances by a sampled token; returns False if that is impossible, and the choice has to end."""
        ...

    def rollback(self, count: int) -> None:
        """Undoes the last ``count`` accepted tokens."""
        ...

    def fork(self) -> Self:
        """Returns an independent matcher in the same state."""
        ...


def bits(vocab: int, ids: Iterable[int]) -> UInt8:
    """Returns a mask that holds ``ids``; those outside the vocabulary are ignored."""
    found = np.zeros(-(-vocab // 8) * 8, bool)
    found[[i for i in ids if 0 <= i < vocab]] = True
    return np.packbits(found, bitorder="little")


def holds(row: UInt8, token: int) -> bool:
    """Returns True if a mask holds an id."""
    return token >> 3 < len(row) and bool(row[token >> 3] >> (token & 7) & 1)


def only_id(row: UInt8) -> int:
    """Returns the id that a mask holds, if it holds one alone; else -1."""
    found = np.flatnonzero(row)
    if len(found) != 1:
        return -1
    value = int(row[found[0]])
    return -1 if value & (value - 1) else int(found[0]) * 8 + value.bit_length() - 1


def keep(row: UInt8, token: int) -> None:
    """Removes from a mask all ids but one."""
    held = holds(row, token)
    row[:] = 0
    if held:
        row[token >> 3] = 1 << (token & 7)


def remove(row: UInt8, tokens: Iterable[int]) -> None:
    """Removes ids from a mask."""
    for token in tokens:
        row[token >> 3] &= 255 ^ (1 << (token & 7))


class AllowedIds:
    """A fixed mask; it has no state."""

    def __init__(self, mask: UInt8) -> None:
        self.mask = mask

    def restrict(self, row: UInt8) -> None:
        """Keeps only the ids of the fixed mask."""
        row &= self.mask

    def accept(self, token: int) -> bool:
        """Returns True."""
        return True

    def rollback(self, count: int) -> None:
        """Does nothing, as there is no state."""

    def fork(self) -> AllowedIds:
        """Returns itself."""
        return self


Endings = dict[int, dict[tuple[int, ...], tuple[int, ...]]]
"""Length of a prefix -> prefix -> ids that would complete a word."""


class BadWords:
    """Words that must not occur: the last id of each is banned when the output ends with all its other ids."""

    def __init__(self, endings: Endings, output: Sequence[int] = ()) -> None:
        self._endings = endings
        self._output = list(output)

    @classmethod
    def of(cls, words: Iterable[tuple[int, ...]], vocab: int) -> BadWords:
        """Returns the matcher of these words; words with an id outside the vocabulary are ignored."""
        found: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for word in words:
            if word and all(0 <= t < vocab for t in word):
                found[len(word) - 1][word[:-1]].append(word[-1])
        return cls({n: {b: tuple(ends) for b, ends in some.items()} for n, some in found.items()})

    def restrict(self, row: UInt8) -> None:
        """Removes the ids that would complete a word."""
        for length, endings in self._endings.items():
            beginning = tuple(self._output[len(self._output) - length :]) if length else ()
            if length <= len(self._output):
                remove(row, endings.get(beginning, ()))

    def accept(self, token: int) -> bool:
        """Appends the token to the output."""
        self._output.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Removes the last ``count`` tokens."""
        del self._output[len(self._output) - count :]

    def fork(self) -> BadWords:
        """Returns a matcher of the same words with a copy of the output."""
        return BadWords(self._endings, self._output)


class ThinkingMatcher:
    """Counts the thinking tokens; once the budget is spent, forces the ids that end thinking one after another."""

    def __init__(self, budget: ThinkingBudget, output: Sequence[int] = (), spent: Sequence[int] = ()) -> None:
        self._budget = budget
        self._output = list(output)
        self._spent = list(spent) or [0 if budget.open else -1]
        """``_spent[i]``: thinking tokens after ``i`` tokens of output; -1: outside a thinking section."""

    @property
    def forced(self) -> int:
        """The id that must come next; -1: any id may."""
        if not 0 <= self._budget.tokens <= self._spent[-1]:
            return -1
        end = self._budget.end
        for begun in range(len(end) - 1, 0, -1):
            if self._ends_with(end[:begun]):
                return end[begun]
        return end[0]

    def restrict(self, row: UInt8) -> None:
        """Keeps only the forced id, unless the mask forbids it: then thinking continues."""
        forced = self.forced
        if forced >= 0 and holds(row, forced):
            keep(row, forced)

    def accept(self, token: int) -> bool:
        """Counts the token."""
        self._output.append(token)
        spent = self._spent[-1]
        if spent >= 0:
            spent = -1 if self._ends_with(self._budget.end) else spent + 1
        elif self._budget.start and self._ends_with(self._budget.start):
            spent = 0
        self._spent.append(spent)
        return True

    def rollback(self, count: int) -> None:
        """Removes the last ``count`` tokens and their counts."""
        del self._output[len(self._output) - count :]
        del self._spent[len(self._spent) - count :]

    def fork(self) -> ThinkingMatcher:
        """Returns an independent matcher with the same budget and state."""
        return ThinkingMatcher(self._budget, self._output, self._spent)

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return len(ids) <= len(self._output) and tuple(self._output[len(self._output) - len(ids) :]) == ids
