"""Drafts from a predicted answer (OpenAI's ``prediction``): the place in it follows the answer. Pure Python.

The same class counts, in the API process, how many of the predicted tokens appeared in the answer: the count depends on
the answer alone, not on what was drafted when.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from trencadis.core.spec.draft_proposer_interface import NO_DRAFT, DraftTokens

SUFFIX, LONGEST_SUFFIX = 2, 8
"""Lengths of suffixes of the answer that are searched for in the prediction, in ids."""

NEAREST = 16
"""Occurrences of a suffix that are compared, nearest first."""


class PredictedText:
    """The place in a predicted text from which the next tokens of an answer are expected.

    After a mismatch the place moves on by one, as if one token had been replaced. If the next token does not match
    either, the longest suffix of the answer is searched for in the prediction, nearest occurrence first.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self.predicted = tuple(predicted)
        self.accepted = 0
        """Tokens of the answer that were predicted; a prediction that the answer repeats counts twice."""
        self._at = 0
        self._misses = 0
        self._answer: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] | None = None

    @property
    def aligned(self) -> bool:
        """True if the last token matched, or only the last one did not."""
        return self._misses < 2 and self._at < len(self.predicted)

    def count_accepted(self) -> int:
        """Returns how many predicted tokens have appeared in the answer."""
        return min(self.accepted, len(self.predicted))

    def count_rejected(self) -> int:
        """Returns how many predicted tokens have not."""
        return len(self.predicted) - self.count_accepted()

    def accept(self, token: int) -> None:
        """Moves the place by one token of the answer."""
        self._answer.append(token)
        matched = self._at < len(self.predicted) and self.predicted[self._at] == token
        self._at += 1
        if matched:
            self.accepted += 1
            self._misses = 0
            return
        self._misses += 1
        if self._misses > 1:
            self._search()

    def _search(self) -> None:
        """Moves the place to the end of the longest suffix of the answer that the prediction holds."""
        found, length = self._find()
        if found >= 0:
            self.accepted += min(length, self._misses)  # they were predicted, at another place
            self._at, self._misses = found, 0

    def _find(self) -> tuple[int, int]:
        """Returns (index, length): the index after the occurrence, and the suffix's length; (-1, 0): none."""
        answer, text = self._answer, self.predicted
        if len(answer) < SUFFIX:
            return -1, 0
        if self._ends is None:
            self._ends = {}
            for end in range(SUFFIX, len(text) + 1):
                self._ends.setdefault(text[end - SUFFIX : end], []).append(end)
        ends = self._ends.get(tuple(answer[-SUFFIX:]), [])
        middle = bisect_left(ends, self._at)
        near = sorted(ends[max(middle - NEAREST, 0) : middle + NEAREST], key=lambda end: abs(end - self._at))
        best, longest = -1, 0
        for end in near[:NEAREST]:
            length = SUFFIX
            most = min(LONGEST_SUFFIX, end, len(answer))
            while length < most and text[end - length - 1] == answer[-length - 1]:
                length += 1
            if length > longest:
                best, longest = end, length
        return best, longest

    def next_ids(self, count: int) -> tuple[int, ...]:
        """Returns up to ``count`` predicted ids from the place on; none if the place was lost."""
        return self.predicted[self._at : self._at + count] if self.aligned else ()


class PredictionProposer:
    """Implements ``DraftProposer`` over a predicted answer.

    Args:
        predicted: its ids; ``prompt``: number of tokens of the prompt.
    """

    def __init__(self, predicted: Sequence[int], prompt: int) -> None:
        self._text = PredictedText(predicted)
        self._seen = prompt

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns the predicted ids that come next."""
        for token in tokens[self._seen : known]:
            self._text.accept(token)
        self._seen = max(self._seen, known)
        ids = self._text.next_ids(count)
        return DraftTokens(ids, "prediction") if ids else NO_DRAFT
