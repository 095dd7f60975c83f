"""Computes which ids a choice may sample next, from all its matchers and its end. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trencadis.core.masks.grammar_matcher import GrammarMatcher
from trencadis.core.masks.matchers import Matcher, ThinkingMatcher, bits, only_id, remove
from trencadis.core.step import UInt8

NOTHING_LEFT = "The constraints of this request leave no token that may follow."


class ForcedId(NamedTuple):
    """An id that was the only one allowed; ``text``: it is a stop id that does not end the choice here."""

    token: int
    text: bool


@dataclass(frozen=True)
class ChoiceEnds:
    """The ids that end choices, and the mask that applies after an end.

    Args:
        eos: ids that end a text.
        everything: the mask that allows the whole vocabulary.
        surplus: the mask of a choice that has ended, for which a step in flight samples once more.
    """

    eos: frozenset[int]
    everything: UInt8
    surplus: UInt8

    @classmethod
    def of(cls, vocab: int, eos: Collection[int]) -> ChoiceEnds:
        """Builds the masks over ``vocab`` ids."""
        everything = bits(vocab, range(vocab))
        found = frozenset(t for t in eos if 0 <= t < vocab)
        return cls(found, everything, bits(vocab, found) if found else everything)


class ChoiceMasks:
    """The matchers of one choice.

    A grammar, allowed ids and bad words are always enforced. A thinking budget and banned ids (min_tokens, ignore_eos)
    are dropped if they would leave no id.

    Args:
        stops: ids besides EOS that end the choice. With a grammar they do so only where it may end; elsewhere they
            count as text if the grammar accepts them.
        endless: EOS does not end the choice.
    """

    def __init__(
        self,
        ends: ChoiceEnds,
        stops: Collection[int],
        grammar: GrammarMatcher | None = None,
        others: Sequence[Matcher] = (),
        thinking: ThinkingMatcher | None = None,
        endless: bool = False,
    ) -> None:
        self._ends, self._endless = ends, endless
        self._stops = frozenset(stops)
        self._grammar, self._others, self._thinking = grammar, list(others), thinking
        self._history: list[bool] = []
        """For each token, True if the matchers have accepted it.

        The token that ends the choice and later ones are not passed to them.
        """
        self.failure = ""
        """The reason why the choice cannot continue, in one line."""
        self._next: UInt8 | None = None
        """The mask of the next token without banned ids, if ``force`` has computed it."""

    @property
    def ended(self) -> bool:
        """True if the choice has sampled its last token."""
        return bool(self._history) and not self._history[-1]

    def fill(self, row: UInt8, banned: Collection[int] = ()) -> None:
        """Writes the mask of the next token to ``row``; ``banned`` are ids that should not be sampled now."""
        if self.failure or self.ended:
            row[:] = self._ends.surplus
            return
        if self._next is not None:
            row[:] = self._next
        else:
            row[:] = self._ends.everything
            self._restrict(row)
            if self._thinking is not None:
                self._thinking.restrict(row)
        if banned:
            kept = row.copy()
            remove(row, banned)
            if not row.any():
                row[:] = kept

    def _restrict(self, row: UInt8) -> None:
        """Applies the constraints that are always enforced."""
        if self._grammar is not None:
            self._grammar.restrict(row)
            self.failure = self._grammar.error
            if self._stops and self._grammar.accepting:
                for token in self._stops:
                    row[token >> 3] |= 1 << (token & 7)
        for matcher in self._others:
            matcher.restrict(row)
        if self._grammar is not None and self._others and not row.any():
            self._grammar.respell(row)  # the canonical ids of a forced text are forbidden, so allow other spellings
            for matcher in self._others:
                matcher.restrict(row)
        if not self.failure and not row.any():
            self.failure = NOTHING_LEFT
        if self.failure:
            row[:] = self._ends.surplus

    def accept(self, token: int) -> bool:
        """Advances by one token.

        Returns True if an id of ``stops`` was sampled as text, because the grammar may not end here.
        """
        self._next = None
        if self.failure or self.ended:
            self._history.append(False)
            return False
        stop = token in self._stops
        over = token in self._ends.eos and not self._endless
        over |= stop and (self._grammar is None or self._grammar.accepting)
        self._history.append(not over)
        if over:
            return False
        if self._grammar is not None and not self._grammar.accept(token):
            self.failure = self._grammar.error or "The grammar does not take what was drawn."
        for matcher in (*self._others, *((self._thinking,) if self._thinking else ())):
            matcher.accept(token)
        return stop

    def force(self, most: int) -> list[ForcedId]:
        """Accepts ids as long as the mask holds one id alone, at most ``most``; returns them.

        Each of them is what would be sampled. Banned ids do not matter, since they give way where nothing else is left.
        """
        found: list[ForcedId] = []
        while len(found) < most and not (self.failure or self.ended):
            row = self._ends.everything.copy()
            self.fill(row)
            if self.failure:
                break
            token = only_id(row)
            if token < 0:
                self._next = row
                break
            found.append(ForcedId(token, self.accept(token)))
        return found

    def rollback(self, count: int) -> None:
        """Undoes the last ``count`` tokens; a failure stays."""
        self._next = None
        seen = sum(self._history[len(self._history) - count :])
        del self._history[len(self._history) - count :]
        if seen:
            for matcher in (self._grammar, self._thinking, *self._others):
                if matcher is not None:
                    matcher.rollback(seen)

    def fork(self) -> ChoiceMasks:
        """Returns an independent copy in the same state."""
        made = ChoiceMasks(
            self._ends,
            self._stops,
            None if self._grammar is None else self._grammar.fork(),
            [m.fork() for m in self._others],
            None if self._thinking is None else self._thinking.fork(),
            self._endless,
        )
        made._history, made.failure, made._next = list(self._history), self.failure, self._next
        return made
