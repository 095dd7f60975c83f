"""Masks of the places after drafts: a copy of the choice goes ahead, the choice itself waits for what is accepted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, Self

from trencadis.core.step import UInt8
from trencadis.core.token_masks.token_rule_matchers import holds


class MaskedChoice(Protocol):
    """The matchers of one choice, as far as drafts need them; ``core.token_masks.matcher_manager.ChoiceMasks`` is
    one.
    """

    failure: str

    @property
    def ended(self) -> bool:
        """True if the choice has sampled its last token."""
        ...

    def fill(self, row: UInt8, banned: Collection[int] = ()) -> None:
        """Writes the mask of the next token to ``row``."""
        ...

    def accept(self, token: int) -> bool:
        """Advances by one token."""
        ...

    def fork(self) -> Self:
        """Returns an independent copy in the same state."""
        ...


class ChoiceRows(NamedTuple):
    """The rows of SAMPLE that one choice has: the first, and the drafts before each of the others."""

    first: int
    drafts: tuple[int, ...] = ()


class DraftFailure(NamedTuple):
    """A place after drafts where the rules of a choice leave no id: the number of drafts before it, and the reason."""

    place: int
    message: str


class DraftMasks:
    """Goes through the drafts of one choice, place by place.

    A copy is advanced and thrown away, so that no limit of a grammar that only a rejected draft reaches has an effect.

    Args:
        choice: the choice, before the drafts.
        row: its mask at the first place.
    """

    def __init__(self, handle: int, choice: MaskedChoice, row: UInt8) -> None:
        self.handle = handle
        self.failure: DraftFailure | None = None
        self._ahead, self._row, self._place = choice.fork(), row, 0
        self._forbidden = bool(choice.failure) or choice.ended

    def fill(self, row: UInt8, draft: int, banned: Collection[int]) -> None:
        """Writes to ``row`` the mask of the place after ``draft``, the next of the drafts.

        After a draft that the masks forbid, all ids are allowed: such a draft is rejected, and no later place counts.
        """
        self._place += 1
        self._forbidden = self._forbidden or not holds(self._row, draft)
        if self._forbidden:
            row[:] = 255
            return
        self._ahead.accept(draft)
        self._ahead.fill(row, banned)
        self._row = row
        if self._ahead.failure:
            self.failure, self._forbidden = DraftFailure(self._place, self._ahead.failure), True


def count_accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """Returns how many of ``drafts`` equal the ``tokens`` that were drawn in their places."""
    for place, draft in enumerate(drafts):
        if tokens[place] != draft:
            return place
    return len(drafts)
