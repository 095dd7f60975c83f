"""Manages the matchers of a rank's choices: Steps open and close them, sampled tokens advance them.

The token of a step is not known when the next step is issued, so a Step cannot contain masks. Instead, every rank has a
matcher manager and derives the same masks from the same tokens.

Computes which ids a choice may sample next, from all its matchers and its end. Torch-free.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from trencadis.core.output_constraints import LIBRARY_FAILED
from trencadis.core.step import Opening, UInt8
from trencadis.core.step_output import HeadOutput
from trencadis.core.token_masks.draft_masks import ChoiceRows, DraftFailure, DraftMasks, count_accepted
from trencadis.core.token_masks.grammar_matcher import CompiledGrammars, GrammarMatcher, first_line
from trencadis.core.token_masks.token_rule_matchers import (
    AllowedIds,
    BadWords,
    Matcher,
    ThinkingMatcher,
    bits,
    only_id,
    remove,
)

if TYPE_CHECKING:
    from trencadis.core.device.backend import Pending


NOTHING_LEFT = "The constraints of this request leave no token that may follow."

TOO_SLOW = "The masks of this request's grammar take too long to compute."

SECONDS, SECONDS_A_TOKEN = 0.5, 0.005
"""CPU seconds that the masks of a choice may take, and more for each of its tokens.

Other requests wait in the same step. Limits of the library bound each mask, but not their sum: an ambiguous grammar may
need 50 ms for each token, where JSON needs 0.05 ms.
"""


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
        self.seconds = 0.0
        """CPU seconds that the matchers have taken."""
        self._next: UInt8 | None = None
        """The mask of the next token without banned ids, if ``force`` has computed it."""

    @property
    def ended(self) -> bool:
        """True if the choice has sampled its last token."""
        return bool(self._history) and not self._history[-1]

    @property
    def too_slow(self) -> bool:
        """True if the matchers have taken more than their CPU seconds.

        Differs between ranks, so masks do not depend on it; it is only reported.
        """
        return self.seconds > SECONDS + SECONDS_A_TOKEN * len(self._history)

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
            self.failure = self._grammar.error or f"{LIBRARY_FAILED}it does not accept what was sampled"
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


@dataclass(slots=True)
class PendingSample:
    """A pending SAMPLE; its tokens are passed to the matchers of its choices when it is fetched.

    Args:
        rows: handle -> its rows.
        failures: handle -> why its choice cannot continue; ``failed_at``: at which of its draws, if not at the first.
        text: (handle, draw) of stop ids that counted as text.
        forced: handle -> ids that the masks forced after its last token.
        ahead: handle -> a place after drafts where its rules leave no id.
    """

    manager: MatcherManager
    head: Pending[HeadOutput]
    rows: Mapping[int, ChoiceRows]
    choices: Mapping[int, ChoiceMasks]
    output: HeadOutput | None = None
    failures: dict[int, str] = field(default_factory=dict)
    failed_at: dict[int, int] = field(default_factory=dict)
    text: set[tuple[int, int]] = field(default_factory=set)
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ahead: Mapping[int, DraftFailure] = field(default_factory=dict)

    def done(self) -> bool:
        """Returns True if ``result`` would not block."""
        return self.output is not None or self.head.done()

    def result(self) -> HeadOutput:
        """Waits for the tokens and passes them to the matchers; may be called by several threads."""
        self.manager.catch_up(self)
        assert self.output is not None
        return self.output

    def accept_tokens(self) -> None:
        """Waits for the tokens and passes those of each choice to it, as far as its drafts were accepted."""
        self.output = self.head.result()
        for handle, choice in self.choices.items():
            started = time.thread_time()
            first, drafts = self.rows[handle]
            tokens = self.output.token[first : first + len(drafts) + 1].tolist()
            for place in range(count_accepted(tokens, drafts) + 1):
                if choice.accept(tokens[place]):
                    self.text.add((handle, place))
                if handle in self.ahead and self.ahead[handle].place == place:
                    choice.failure = choice.failure or self.ahead[handle].message
                if choice.failure:
                    self._fail(handle, place, choice.failure)
                if choice.failure or choice.ended:
                    break
            forces = self.manager.forces(handle)
            if forces:
                self._force(handle, choice, place + 1, forces)
            choice.seconds += time.thread_time() - started
            if choice.too_slow and handle not in self.failures and not choice.ended:
                self._fail(handle, place, TOO_SLOW)

    def _force(self, handle: int, choice: ChoiceMasks, place: int, most: int) -> None:
        """Adds the ids that the masks of a choice force from draw ``place`` on."""
        forced = choice.force(most)
        if forced:
            self.forced[handle] = tuple(one.token for one in forced)
            self.text.update((handle, at) for at, one in enumerate(forced, place) if one.text)

    def _fail(self, handle: int, place: int, reason: str) -> None:
        self.failures[handle] = reason
        if place:
            self.failed_at[handle] = place


class MatcherManager:
    """The matchers of one rank.

    Args:
        vocab: number of ids that the model can sample.
        eos: ids that end a text.
    """

    def __init__(self, vocab: int, eos: Sequence[int] = ()) -> None:
        self.grammars = CompiledGrammars()
        self._vocab = vocab
        self._ends = ChoiceEnds.of(vocab, eos)
        self._choices: dict[int, ChoiceMasks] = {}
        self._forces: dict[int, int] = {}
        self._drafts: DraftMasks | None = None
        """The drafts whose masks are being filled."""
        self._last_row: UInt8 | None = None
        """The mask that was filled last."""
        self._draft_failures: dict[int, DraftFailure] = {}
        self._pending: deque[PendingSample] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._choices)

    def apply(self, closings: Sequence[int], openings: Sequence[Opening]) -> None:
        """Closes choices that have left, then opens new ones; a choice that returns is in both lists."""
        for key in closings:
            self._choices.pop(key, None)
            self._forces.pop(key, None)
        for opening in openings:
            self._choices[opening.key] = self._open_choice(opening)
            if opening.forces:
                self._forces[opening.key] = opening.forces

    def forces(self, handle: int) -> int:
        """Returns the largest number of ids that a step may force for a choice; 0 once it is closed."""
        return self._forces.get(handle, 0)

    def _open_choice(self, opening: Opening) -> ChoiceMasks:
        """Returns a choice in the state after its current output."""
        rule = opening.rule
        others: list[Matcher] = []
        if rule.allowed:
            more = self._ends.eos if rule.grammar else ()
            others.append(AllowedIds(bits(self._vocab, {*rule.allowed, *more})))
        if rule.words:
            others.append(BadWords.of(rule.words, self._vocab))
        grammar, failure = None, ""
        if rule.grammar:
            try:
                grammar = self.grammars.matcher(rule.grammar)
            except Exception as error:
                failure = first_line(f"{LIBRARY_FAILED}{error}")
        thinking = ThinkingMatcher(rule.thinking) if rule.thinking else None
        made = ChoiceMasks(self._ends, opening.stops, grammar, others, thinking, opening.endless)
        made.failure = failure
        for token in opening.output:
            made.accept(token)
        return made

    def fill(self, handle: int, row: UInt8, banned: Sequence[int], ahead: Sequence[int] = ()) -> None:
        """Writes the mask of the choice's next token to ``row``, or of the token after the drafts ``ahead``.

        Earlier tokens must have been accepted (``catch_up``). Masks after drafts are filled in order, directly after
        those of the places before them.
        """
        started = time.thread_time()
        choice = self._choices[handle]
        if not ahead:
            self._drafts = None
            choice.fill(row, banned)
        else:
            if self._drafts is None or self._drafts.handle != handle:
                assert len(ahead) == 1 and self._last_row is not None
                self._drafts = DraftMasks(handle, choice, self._last_row)
            self._drafts.fill(row, ahead[-1], banned)
            if self._drafts.failure is not None:
                self._draft_failures[handle] = self._drafts.failure
        self._last_row = row
        choice.seconds += time.thread_time() - started

    def track_sample(self, head: Pending[HeadOutput], rows: Mapping[int, ChoiceRows]) -> PendingSample:
        """Registers a launched SAMPLE; ``rows``: handle -> its rows."""
        draws = PendingSample(self, head, rows, {h: self._choices[h] for h in rows}, ahead=self._draft_failures)
        self._draft_failures, self._drafts, self._last_row = {}, None, None
        self._pending.append(draws)
        return draws

    def catch_up(self, until: PendingSample | None = None) -> None:
        """Accepts the tokens of all registered samples in order, or up to ``until``, waiting for their results."""
        with self._lock:
            while self._pending and (until is None or until.output is None):
                self._pending[0].accept_tokens()
                self._pending.popleft()
