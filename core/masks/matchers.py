"""Matchers: each follows the tokens of one choice and says which ids may come next. Torch-free; masks are numpy.

A mask is uint8 [ceil(vocabulary / 8)] in little bit order, as ``HeadInputs.masks`` has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

import numpy as np

from trencadis.core.masks.constraints import ThinkingBudget
from trencadis.core.step import UInt8


class Matcher(Protocol):
    """Follows one choice."""

    def restrict(self, row: UInt8) -> None:
        """Removes from a mask the ids that must not be drawn next."""
        ...

    def accept(self, token: int) -> bool:
        """Moves on by a drawn token; False: the matcher cannot, and the choice has to end."""
        ...

    def rollback(self, count: int) -> None:
        """Undoes the last ``count`` accepted tokens."""
        ...

    def fork(self) -> Self:
        """A matcher in the same state, independent of this one."""
        ...


def bits(vocab: int, ids: Iterable[int]) -> UInt8:
    """A mask that holds ``ids``; those outside the vocabulary are left out."""
    found = np.zeros(-(-vocab // 8) * 8, bool)
    found[[i for i in ids if 0 <= i < vocab]] = True
    return np.packbits(found, bitorder="little")


def holds(row: UInt8, token: int) -> bool:
    """Whether a mask holds an id."""
    return token >> 3 < len(row) and bool(row[token >> 3] >> (token & 7) & 1)


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
        """Keeps what the mask holds."""
        row &= self.mask

    def accept(self, token: int) -> bool:
        """Always."""
        return True

    def rollback(self, count: int) -> None:
        """Nothing changes."""

    def fork(self) -> AllowedIds:
        """Itself."""
        return self


Endings = dict[int, dict[tuple[int, ...], tuple[int, ...]]]
"""Length of a beginning -> beginning -> ids that would complete a word."""


class BadWords:
    """Words that must not occur: the last id of each is banned where the output ends with all its others."""

    def __init__(self, endings: Endings, output: Sequence[int] = ()) -> None:
        self._endings = endings
        self._output = list(output)

    @classmethod
    def of(cls, words: Iterable[tuple[int, ...]], vocab: int) -> BadWords:
        """The matcher of these words; one with an id outside the vocabulary cannot occur."""
        found: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for word in words:
            if word and all(0 <= t < vocab for t in word):
                found[len(word) - 1][word[:-1]].append(word[-1])
        return cls({n: {b: tuple(ends) for b, ends in some.items()} for n, some in found.items()})

    def restrict(self, row: UInt8) -> None:
        """Bans what would complete a word."""
        for length, endings in self._endings.items():
            beginning = tuple(self._output[len(self._output) - length :]) if length else ()
            if length <= len(self._output):
                remove(row, endings.get(beginning, ()))

    def accept(self, token: int) -> bool:
        """Remembers the token."""
        self._output.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Forgets the last tokens."""
        del self._output[len(self._output) - count :]

    def fork(self) -> BadWords:
        """The same words, with a copy of the output."""
        return BadWords(self._endings, self._output)


class ThinkingMatcher:
    """Counts the tokens of a thought; once the budget is spent, the ids that end it are forced one after another."""

    def __init__(self, budget: ThinkingBudget, output: Sequence[int] = (), spent: Sequence[int] = ()) -> None:
        self._budget = budget
        self._output = list(output)
        self._spent = list(spent) or [0 if budget.open else -1]
        """``_spent[i]``: tokens that the thought has after ``i`` tokens of output; -1: outside a thought."""

    @property
    def forced(self) -> int:
        """The id that must come next; -1: any."""
        if not 0 <= self._budget.tokens <= self._spent[-1]:
            return -1
        end = self._budget.end
        for begun in range(len(end) - 1, 0, -1):
            if self._ends_with(end[:begun]):
                return end[begun]
        return end[0]

    def restrict(self, row: UInt8) -> None:
        """Allows the forced id and no other, unless the mask already forbids it: then the thought goes on."""
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
        """Forgets the last tokens and their counts."""
        del self._output[len(self._output) - count :]
        del self._spent[len(self._spent) - count :]

    def fork(self) -> ThinkingMatcher:
        """The same budget, spent as far as here."""
        return ThinkingMatcher(self._budget, self._output, self._spent)

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return len(ids) <= len(self._output) and tuple(self._output[len(self._output) - len(ids) :]) == ids
