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
from trencadis.core.masks.grammar_matcher import CompiledGrammars, first_line
from trencadis.core.masks.matchers import AllowedIds, BadWords, Matcher, ThinkingMatcher, bits
from trencadis.core.step import HeadOutput, Opening, UInt8

if TYPE_CHECKING:
    from trencadis.core.backend import Pending


@dataclass(slots=True)
class PendingSample:
    """A pending SAMPLE; its tokens are passed to the matchers of its choices when it is fetched.

    Args:
        rows: handle -> its row.
        failures: handle -> why its choice cannot continue.
        text: handles whose stop id counted as text.
    """

    manager: MatcherManager
    head: Pending[HeadOutput]
    rows: Mapping[int, int]
    choices: Mapping[int, ChoiceMasks]
    output: HeadOutput | None = None
    failures: dict[int, str] = field(default_factory=dict)
    text: set[int] = field(default_factory=set)

    def done(self) -> bool:
        """Returns True if ``result`` would not block."""
        return self.output is not None or self.head.done()

    def result(self) -> HeadOutput:
        """Waits for the tokens and passes them to the matchers; may be called by several threads."""
        self.manager.catch_up(self)
        assert self.output is not None
        return self.output

    def accept_tokens(self) -> None:
        """Waits for the tokens and passes each to its choice."""
        self.output = self.head.result()
        for handle, choice in self.choices.items():
            if choice.accept(int(self.output.token[self.rows[handle]])):
                self.text.add(handle)
            if choice.failure:
                self.failures[handle] = choice.failure


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
        self._pending: deque[PendingSample] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._choices)

    def apply(self, closings: Sequence[int], openings: Sequence[Opening]) -> None:
        """Closes choices that have left, then opens new ones; a choice that returns is in both lists."""
        for key in closings:
            self._choices.pop(key, None)
        for opening in openings:
            self._choices[opening.key] = self._open_choice(opening)

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

    def fill(self, handle: int, row: UInt8, banned: Sequence[int]) -> None:
        """Writes the mask of the choice's next token to ``row``.

        Earlier tokens must have been accepted (``catch_up``).
        """
        self._choices[handle].fill(row, banned)

    def track_sample(self, head: Pending[HeadOutput], rows: Mapping[int, int]) -> PendingSample:
        """Registers a launched SAMPLE; ``rows``: handle -> its row."""
        draws = PendingSample(self, head, rows, {h: self._choices[h] for h in rows})
        self._pending.append(draws)
        return draws

    def catch_up(self, until: PendingSample | None = None) -> None:
        """Accepts the tokens of all registered samples in order, or up to ``until``, waiting for their results."""
        with self._lock:
            while self._pending and (until is None or until.output is None):
                self._pending[0].accept_tokens()
                self._pending.popleft()
