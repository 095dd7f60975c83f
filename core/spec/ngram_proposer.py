"""Sources of drafts, drafts by n-grams, and how many drafts pay. Torch-free.

A draft is a guess of the next tokens of a sequence. It costs time if it is wrong and never changes an answer: the
engine draws the target model's own token at each drafted place, and keeps the drafts as far as both are equal.

Drafts by n-grams are what followed the longest suffix of the text where it last occurred. The index grows with the
text. Ids of the prompt are indexed in one pass into sorted arrays (12 bytes for each n-gram), later ids go to
dictionaries, so that a token costs a few microseconds at any length.

How many drafts pay follows from measured seconds of steps against measured acceptance. A step of n tokens verifies
drafts in the time by which it is longer than one without them. On a device whose launches wait for the weights that is
little; for many rows it is as long as the drafts' own share.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trencadis.core.spec.spec_config import LONGEST, SHORTEST


class DraftTokens(NamedTuple):
    """Drafted ids, and the name of the source that proposed them; no ids: nothing is proposed."""

    ids: tuple[int, ...] = ()
    source: str = ""


NO_DRAFT = DraftTokens()


class DraftProposer(Protocol):
    """Proposes the next tokens of one sequence.

    ``tokens[:known]`` are the ids of prompt and answer. Between two calls ``known`` never decreases and known ids do
    not change, so that a source may keep what it has learned of them.
    """

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns at most ``count`` ids that may follow ``tokens[:known]``."""
        ...


class FirstProposal:
    """Asks sources in turn and returns the first proposal that is not empty."""

    def __init__(self, sources: Sequence[DraftProposer]) -> None:
        self._sources = tuple(sources)

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns the proposal of the first source that has one."""
        for source in self._sources:
            found = source.propose(tokens, known, count)
            if found.ids:
                return found
        return NO_DRAFT


def cut_at(ids: Sequence[int], ends: frozenset[int], vocab: int) -> tuple[int, ...]:
    """Returns ``ids`` up to the first that ends a text or is outside the vocabulary: nothing after it can count."""
    for at, token in enumerate(ids):
        if token in ends or not 0 <= token < vocab:
            return tuple(ids[:at])
    return tuple(ids)


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


FIRST_RATE = 0.7
"""Assumed probability that a draft is accepted, before any was verified."""

RATE_WEIGHT = 0.15
"""Weight of one verified draft in the mean of its place."""

RETRY = 48
"""Proposals that are skipped before one is verified again, so that a better text is noticed."""

TRIAL = 12
"""Of so many proposals of a model one is made in the way that was accepted less often."""

TIME_WEIGHT = 0.2
"""Weight of a new duration in a mean."""

LEAP = 4.0
"""A duration counts at most this many times its mean, since a stalled step is no evidence for the next."""

SLOPE = 0.04
"""Assumed growth of a step's duration for each further token, relative to one token, before it was measured."""

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens whose durations are kept; others count to the next smaller one."""


@dataclass(slots=True)
class AcceptanceRates:
    """Of one sequence: the probability that the draft at each place is accepted if those before it are.

    Args:
        most: largest number of drafts.
    """

    most: int
    rates: list[float] = field(default_factory=list)
    skipped: int = 0
    """Proposals since the last one that was verified."""

    def rate(self, place: int) -> float:
        """Returns the probability of the draft at ``place``, from 0; places never verified have that before them."""
        if place < len(self.rates):
            return self.rates[place]
        return self.rates[-1] if self.rates else FIRST_RATE

    def learn(self, drafted: int, accepted: int) -> None:
        """Updates the means: the first ``accepted`` of ``drafted`` ids were accepted."""
        self.skipped = 0
        for place in range(min(accepted + 1, drafted)):
            before = self.rate(place)
            if place == len(self.rates):
                self.rates.append(before)
            self.rates[place] = before + RATE_WEIGHT * ((place < accepted) - before)

    def gains(self, count: int) -> list[float]:
        """Returns the expected number of accepted ids of 1, 2, ... ``count`` drafts."""
        found, whole, chance = [], 0.0, 1.0
        for place in range(count):
            chance *= self.rate(place)
            whole += chance
            found.append(whole)
        return found


@dataclass(slots=True)
class DraftModes:
    """Of one sequence that samples: whether drafts of a model are its likeliest ids or drawn by the token's random
    number, whichever was accepted more often.
    """

    shares: list[float] = field(default_factory=lambda: [FIRST_RATE, FIRST_RATE])
    asked: int = 0
    drawn: bool = False

    def choose(self) -> bool:
        """Returns True if the next drafts are drawn; now and then the other way is tried."""
        self.asked += 1
        better = self.shares[True] >= self.shares[False]
        self.drawn = better if self.asked % TRIAL else not better
        return self.drawn

    def learn(self, drafted: int, accepted: int) -> None:
        """Updates the mean share of accepted drafts of the way that was chosen last."""
        before = self.shares[self.drawn]
        self.shares[self.drawn] = before + RATE_WEIGHT * (accepted / drafted - before)


class StepSeconds:
    """Mean durations of steps without prompts, by their number of tokens.

    Args:
        slope: growth of the duration for each further token relative to one token, where nothing was measured.
    """

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._seconds: dict[int, float] = {}

    @property
    def measured(self) -> bool:
        """True if durations are seconds."""
        return bool(self._seconds)

    def learn(self, tokens: int, seconds: float) -> None:
        """Updates the mean of steps of this size."""
        if seconds <= 0 or tokens < 1:
            return
        at = bisect_right(SIZES, tokens) - 1
        known = self._seconds.get(at)
        seconds /= 1 + self._slope * (tokens - SIZES[at])
        if known is not None:
            seconds = known + TIME_WEIGHT * (min(seconds, LEAP * known) - known)
        self._seconds[at] = seconds

    def estimate(self, tokens: int) -> float:
        """Returns the relative or, once measured, absolute duration of a step of ``tokens`` tokens.

        Sizes that were not measured are scaled from the nearest measured one. A larger step never counts as shorter.
        """
        model = 1 + self._slope * (tokens - 1)
        if not self._seconds:
            return model
        at = bisect_right(SIZES, tokens) - 1
        near = min(self._seconds, key=lambda one: (abs(one - at), one))
        found = self._seconds[near] * model / (1 + self._slope * (SIZES[near] - 1))
        below = [seconds for one, seconds in self._seconds.items() if one < at]
        return max(found, *below) if below else found

    def ratio(self, tokens: int, more: int) -> float:
        """Returns by which factor ``more`` further tokens lengthen a step of ``tokens`` tokens; at least 1."""
        return max(self.estimate(tokens + more) / self.estimate(tokens), 1.0)


def choose_count(
    rates: AcceptanceRates, seconds: StepSeconds, most: int, tokens: int, expected: float, each: float = 0.0
) -> int:
    """Returns how many of ``most`` drafts give the step most tokens a second; 0: none pays.

    Args:
        tokens: tokens of the step without them; ``expected``: the tokens that it draws and accepts without them.
        each: seconds that a draft takes to be made.
    """
    best, found = expected, 0
    making = each / seconds.estimate(tokens) if each and seconds.measured else 0.0
    for count, gain in enumerate(rates.gains(most), 1):
        speed = (expected + gain) / (seconds.ratio(tokens, count) + count * making)
        if speed > best:
            best, found = speed, count
    if found:
        return found
    rates.skipped += 1
    return 1 if most and rates.skipped >= RETRY else 0
