"""Manages the matchers of a rank's choices: Steps open and close them, sampled tokens advance them.

The token of a step is not known when the next step is issued, so a Step cannot contain masks. Instead, every rank has a
matcher manager and derives the same masks from the same tokens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trencadis.core.masks.choice_masks import ChoiceEnds, ChoiceMasks
from trencadis.core.masks.draft_masks import ChoiceRows, DraftFailure, DraftMasks, count_accepted
from trencadis.core.masks.grammar_matcher import CompiledGrammars, first_line
from trencadis.core.masks.matchers import AllowedIds, BadWords, Matcher, ThinkingMatcher, bits
from trencadis.core.step import HeadOutput, Opening, UInt8

if TYPE_CHECKING:
    from trencadis.core.backend import Pending


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
                failure = first_line(f"{type(error).__name__}: {error}")
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
        if not ahead:
            self._drafts = None
            self._choices[handle].fill(row, banned)
        else:
            if self._drafts is None or self._drafts.handle != handle:
                assert len(ahead) == 1 and self._last_row is not None
                self._drafts = DraftMasks(handle, self._choices[handle], self._last_row)
            self._drafts.fill(row, ahead[-1], banned)
            if self._drafts.failure is not None:
                self._draft_failures[handle] = self._drafts.failure
        self._last_row = row

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
