"""Drafts by counting: what most often followed a suffix in the server's recent answers. Pure Python.

Counts of different tenants, and of requests with different ``cache_salt``, are separate: no request can learn from the
speed of its answer what another tenant's answers held. All counts together stay below a number of bytes: they are kept
in two generations, and once the younger one has half of the bytes, the older one is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from trencadis.core.spec.draft_proposer_interface import NO_DRAFT, DraftTokens
from trencadis.core.spec.ngram_proposer import NgramIndex, hash_ids
from trencadis.core.spec.spec_config import LONGEST, SHORTEST

LIMIT = 64 << 20
"""Bytes of all counts."""

CONTEXT_BYTES, CANDIDATE_BYTES = 240, 64
"""Upper bounds of the bytes of a context with its first candidate, and of each further one."""

CANDIDATES = 4
"""Most ids that are counted for one context; a new one then replaces the rarest."""

LEAST_SHARE = 0.25
"""Smallest share of a context's counts with which an id is proposed."""


class Owner(NamedTuple):
    """Whose answers share counts."""

    tenant: str = ""
    salt: str = ""


Counts = dict[int, list[int]]
"""Hash of a context -> candidate, its count, next candidate, its count, ..."""


class AnswerCounts:
    """Counts of continuations over recent answers, for all owners.

    Args:
        limit: most bytes of all counts.
        shortest, longest: lengths of contexts, in ids.
    """

    def __init__(self, limit: int = LIMIT, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        self.lengths = tuple(range(longest, shortest - 1, -1))
        self._half = limit // 2
        self._young: dict[Owner, Counts] = {}
        self._old: dict[Owner, Counts] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of all counts, rounded up."""
        return self._young_bytes + self._old_bytes

    def add(self, owner: Owner, tokens: Sequence[int], start: int, stop: int) -> None:
        """Counts each of ``tokens[start:stop]`` as the continuation of what precedes it."""
        for at in range(start, stop):
            counts = self._young.setdefault(owner, {})
            for length in self.lengths:
                if length <= at:
                    self._count(counts, hash_ids(tokens[at - length : at]), tokens[at])
            if self._young_bytes > self._half:
                self._old, self._old_bytes = self._young, self._young_bytes
                self._young, self._young_bytes = {}, 0

    def _count(self, counts: Counts, key: int, token: int) -> None:
        found = counts.get(key)
        if found is None:
            counts[key] = [token, 1]
            self._young_bytes += CONTEXT_BYTES
            return
        for at in range(0, len(found), 2):
            if found[at] == token:
                found[at + 1] += 1
                return
        if len(found) < 2 * CANDIDATES:
            found += (token, 1)
            self._young_bytes += CANDIDATE_BYTES
            return
        rarest = min(range(0, len(found), 2), key=lambda at: found[at + 1])
        found[rarest : rarest + 2] = (token, 1)

    def best(self, owner: Owner, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns (id, length): the id that most often followed the longest known suffix of ``tokens``, and the
        suffix's length; (-1, 0): no suffix is known, or no id has ``LEAST_SHARE`` of its counts.
        """
        known = [counts for generation in (self._young, self._old) if (counts := generation.get(owner))]
        if not known:
            return -1, 0
        for length in self.lengths:
            if length > len(tokens):
                continue
            key = hash_ids(tokens[len(tokens) - length :])
            tally: dict[int, int] = {}
            for counts in known:
                found = counts.get(key, ())
                for at in range(0, len(found), 2):
                    tally[found[at]] = tally.get(found[at], 0) + found[at + 1]
            if tally:
                token = max(tally, key=lambda one: (tally[one], -one))
                return (token, length) if tally[token] >= LEAST_SHARE * sum(tally.values()) else (-1, 0)
        return -1, 0


class SuffixProposer:
    """Implements ``DraftProposer`` over the text of one sequence and the recent answers of its owner.

    At each place the longer of two suffixes decides: the one that occurred in the sequence's own text, whose last
    continuation is proposed, or the one with counts. The sequence's answer is counted as it grows.

    Args:
        prompt: number of tokens of the prompt, which is not counted.
    """

    def __init__(self, counts: AnswerCounts, owner: Owner, prompt: int, skipped: Collection[int] = ()) -> None:
        longest, shortest = counts.lengths[0], counts.lengths[-1]
        self._counts, self._owner = counts, owner
        self._own = NgramIndex(shortest, longest, skipped)
        self._longest, self._skipped = longest, frozenset(skipped)
        self._counted = prompt

    def propose(self, tokens: Sequence[int], known: int, count: int) -> DraftTokens:
        """Returns the likeliest ids, one place after the other."""
        self._counts.add(self._owner, tokens, self._counted, known)
        self._counted = max(self._counted, known)
        self._own.extend(tokens, known)
        tail = [*tokens[max(known - self._longest, 0) : known]]
        found: list[int] = []
        for _ in range(count):
            token = self._next(tokens, tail)
            if token < 0 or token in self._skipped:
                break
            found.append(token)
            tail = [*tail, token][-self._longest :]
        return DraftTokens(tuple(found), "suffix") if found else NO_DRAFT

    def _next(self, tokens: Sequence[int], tail: list[int]) -> int:
        """Returns the id that follows ``tail``; below 0: none is likely."""
        at, own = self._own.find_suffix(tokens, tail, len(tail))
        token, length = self._counts.best(self._owner, tail)
        if own and own >= length:
            return tokens[at]
        return token
