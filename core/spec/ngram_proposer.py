"""Drafts by n-grams: what followed the longest suffix of the text where it last occurred. Torch-free.

The index grows with the text. Ids of the prompt are indexed in one pass into sorted arrays (12 bytes for each n-gram),
later ids go to dictionaries, so that a token costs a few microseconds at any length.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trencadis.core.spec.draft_proposer_interface import NO_DRAFT, DraftTokens
from trencadis.core.spec.spec_config import LONGEST, SHORTEST

MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd factor of the polynomial hash of an n-gram, modulo 2^64."""

WORD = (1 << 64) - 1
BULK = 256
"""From this number of new ids on, they are indexed in one pass."""


def hash_ids(ids: Sequence[int]) -> int:
    """Returns the hash of an n-gram, an integer below 2^64; found places are compared with the ids themselves."""
    found = 0
    for token in ids:
        found = (found * MULTIPLIER + token + 1) & WORD
    return found


def hash_windows(ids: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """Returns uint64 [len(ids) - length + 1]: ``hash_ids`` of each window of ``length`` ids."""
    count = len(ids) - length + 1
    words = ids.astype(np.uint64) + np.uint64(1)
    found = np.zeros(count, np.uint64)
    for at in range(length):
        found = found * np.uint64(MULTIPLIER) + words[at : at + count]
    return found


@dataclass(slots=True)
class LengthTable:
    """The last end of each n-gram of one length: sorted arrays of an early part of the text, and a dictionary."""

    keys: array[int] = field(default_factory=lambda: array("Q"))
    ends: array[int] = field(default_factory=lambda: array("i"))
    recent: dict[int, int] = field(default_factory=dict)

    def find(self, key: int) -> int:
        """Returns the index of the id after the last n-gram with this hash; -1: none."""
        end = self.recent.get(key, -1)
        if end >= 0 or not self.keys:
            return end
        at = bisect_left(self.keys, key)
        return self.ends[at] if at < len(self.keys) and self.keys[at] == key else -1

    def put_many(self, keys: NDArray[np.uint64], ends: NDArray[np.int32]) -> None:
        """Adds n-grams with ascending ends; of equal keys the last stays."""
        order = np.argsort(keys, kind="stable")
        keys, ends = keys[order], ends[order]
        last = np.append(keys[1:] != keys[:-1], True)
        self.keys, self.ends = array("Q", keys[last].tobytes()), array("i", ends[last].astype(np.int32).tobytes())


class NgramIndex:
    """Finds where the longest suffix of a text occurred last, before its end.

    Args:
        shortest, longest: lengths of suffixes, in ids.
        skipped: ids that never match and are never proposed (placeholders of images).
    """

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST, skipped: Collection[int] = ()) -> None:
        assert 1 <= shortest <= longest
        self._lengths = tuple(range(longest, shortest - 1, -1))
        self._skipped = frozenset(skipped)
        self._tables = {length: LengthTable() for length in self._lengths}
        self._end = 0
        """n-grams that end before this index are in the tables."""
        self._clear = 0
        """Index after the last skipped id among ``tokens[:_end]``; n-grams begin there or later."""

    def extend(self, tokens: Sequence[int], known: int) -> None:
        """Indexes the n-grams of ``tokens[:known]`` that are followed by a known id."""
        if not self._end and known > BULK:
            self._extend_in_bulk(tokens, known)
        for end in range(self._end + 1, known):
            if tokens[end - 1] in self._skipped:
                self._clear = end
            for length, table in self._tables.items():
                if end - length >= self._clear:
                    table.recent[hash_ids(tokens[end - length : end])] = end
        self._end = max(self._end, known - 1)

    def _extend_in_bulk(self, tokens: Sequence[int], known: int) -> None:
        """Indexes a whole prompt."""
        ids = np.fromiter(tokens[: known - 1], np.int64, known - 1)
        gaps = np.isin(ids, list(self._skipped)) if self._skipped else np.zeros(len(ids), bool)
        before = np.concatenate([[0], np.cumsum(gaps)])
        for length, table in self._tables.items():
            if len(ids) < length:
                continue
            whole = before[length:] == before[:-length]
            ends = np.arange(length, len(ids) + 1, dtype=np.int32)
            table.put_many(hash_windows(ids, length)[whole], ends[whole])
        self._end = known - 1
        self._clear = int(np.flatnonzero(gaps)[-1]) + 1 if gaps.any() else 0

    def find_suffix(self, tokens: Sequence[int], text: Sequence[int], known: int) -> tuple[int, int]:
        """Finds the longest suffix of ``text[:known]`` that occurs in ``tokens``, which are those of the index.

        Returns:
            The index of the id after its last occurrence, and its length; (-1, 0): none occurs.
        """
        for length in self._lengths:
            if length > known:
                continue
            suffix = [*text[known - length : known]]
            if self._skipped and not self._skipped.isdisjoint(suffix):
                continue
            end = self._tables[length].find(hash_ids(suffix))
            if end >= 0 and [*tokens[end - length : end]] == suffix:
                return end, length
        return -1, 0

    def read(self, tokens: Sequence[int], known: int, start: int, count: int) -> tuple[int, ...]:
        """Returns up to ``count`` ids from ``tokens[start]`` on, up to a skipped id.

        Past the end of ``tokens[:known]`` the ids that were read repeat, since the text then repeats itself.
        """
        found: list[int] = []
        for at in range(start, start + count):
            token = tokens[at] if at < known else found[at - known]
            if token in self._skipped:
                break
            found.append(token)
        return tuple(found)


class NgramProposer:
    """Implements ``DraftProposer`` over prompt and answer of one sequence."""

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST, skipped: Collection[int] = ()) -> None:
        self._index = NgramIndex(shortest, longest, skipped)

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns the ids that followed the longest suffix where it occurred last."""
        self._index.extend(tokens, known)
        start, _ = self._index.find_suffix(tokens, tokens, known)
        if start < 0:
            return NO_DRAFT
        return DraftTokens(self._index.read(tokens, known, start, count), "ngram")
