"""Token healing: canonical spellings of a text that a grammar forces while the text after it is still unknown.

Torch-free.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import CACHED, CanonicalTokenizer, split_whole

if TYPE_CHECKING:
    from llguidance import LLMatcher

CONTROL = b"\xff"
"""Marks a control token in forced text; no UTF-8 character contains this byte."""
TAIL = 32
"""Number of last ids of a long forced text that are spelled only after the others have been sampled."""
LONGEST = 64
"""Longest token in bytes considered at the end of a forced text."""
CANDIDATES = 64
"""Largest number of tokens tried for one spelling; if there are more, the spelling is kept."""


class Spelling(NamedTuple):
    """How a forced text may continue in canonical ids.

    Args:
        run: ids that come next regardless of the text that follows; empty: they depend on it.
        firsts: if there is no run, ids of parts of the text that may be next.
        crossing: True if there are ids whose bytes begin with the whole text and continue beyond it.
    """

    run: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    crossing: bool = False


class _SpanningPlace(NamedTuple):
    """A position of a text from which a token may span the ``rest`` of the text and one of ``bytes_after`` after it."""

    place: int
    rest: bytes
    bytes_after: tuple[int, ...]


class TokenHealing:
    """Finds the canonical spellings of a forced text over all continuations that the grammar may allow.

    At the end of a forced text, a canonical token may also contain the beginning of the text that follows (``":"``
    where ``":`` is forced), which changes the ids before it, too. If such a token begins at some position of the text,
    the ids before it are those of the text up to that position. The common prefix of all these spellings comes next in
    any case.
    """

    def __init__(self, tokenizer: CanonicalTokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = frozenset(tokenizer.special_token_ids)
        ids = (i for i, piece in enumerate(tokenizer.tokens) if piece and i not in self._control)
        self._sorted = array("i", sorted(ids, key=tokenizer.tokens.__getitem__))
        self.prefixes = lru_cache(CACHED)(self._find_prefixes)
        """Returns the ids of all tokens that are prefixes of a text."""
        self._next_bytes = lru_cache(CACHED)(self._find_next_bytes)
        self._crosses = lru_cache(CACHED)(self._find_crossing)
        self._places = lru_cache(CACHED)(self._find_places)

    def find(self, matcher: LLMatcher, forced: bytes, last: int) -> Spelling:
        """Returns the canonical spellings of ``forced``, which ``matcher`` forces next, after the id ``last`` (-1:
        none).

        A ``Spelling`` without ids means that they are unknown.
        """
        if CONTROL in forced:
            return Spelling(self._until_control(matcher.compute_ff_tokens()))
        before, own = self._spell(forced, last)
        if len(own) > TAIL:
            return Spelling(own[:-TAIL])
        places = self._places(forced)
        if places is None:
            return Spelling()
        found = [own]
        ids = list(own)
        follow: dict[int, bool] = {}
        for place, rest, bytes_after in places:
            for byte in bytes_after:
                may = follow.get(byte)
                if may is None:
                    token = self._tokenizer.byte_ids.get(byte)
                    may = follow[byte] = token is None or matcher.validate_tokens([*ids, token]) > len(ids)
                if may and self._crosses(before + forced[:place], rest + bytes((byte,))):
                    found += self._spell_before(forced, place, before)
                    break
        crossing = bool(self._next_bytes(forced))
        run = () if crossing else _find_common(found)
        return Spelling(run) if run else Spelling((), tuple({one[0] for one in found}), crossing)

    def _until_control(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns ids up to the last control token: text before a control token always ends there."""
        places = [place for place, token in enumerate(ids) if token in self._control]
        return tuple(ids[: places[-1] + 1]) if places else ()

    def _spell(self, text: bytes, last: int) -> tuple[bytes, tuple[int, ...]]:
        """Returns (bytes of the previous id, ids of the text after it) if they are tokenised jointly, else (b"", ids of
        the text).

        They are joined if the previous id stays the same but changes the ids of the text.
        """
        own = self._tokenizer.encode(text)
        before = self._tokenizer.tokens[last] if last >= 0 else b""
        if before and not split_whole(before)[1]:
            found = self._tokenizer.encode(before + text)
            if found[0] == last and found[1:] != own and found[1:]:
                return before, found[1:]
        return b"", own

    def _spell_before(self, text: bytes, place: int, before: bytes) -> list[tuple[int, ...]]:
        """Returns spellings of a text up to ``place``, after the bytes of the previous id; only first ids are used."""
        if 0x80 <= text[place] < 0xC0:  # inside a character, which the tokenizer cannot encode
            return [(token,) for token in self.prefixes(text)]
        found = self._tokenizer.encode(before + text[:place])
        if before:
            same = self._tokenizer.tokens[found[0]] == before
            found = found[1:] if same else self._tokenizer.encode(text[:place])
        return [found] if found else []

    def _find_prefixes(self, text: bytes) -> tuple[int, ...]:
        tokens = self._tokenizer.tokens
        found = []
        for length in range(1, min(len(text), LONGEST) + 1):
            for token in self._starting_with(text[:length]):
                if len(tokens[token]) > length:
                    break
                found.append(token)
        return tuple(found)

    def _find_next_bytes(self, start: bytes) -> tuple[int, ...]:
        """Returns the bytes that follow ``start`` in tokens that begin with it."""
        tokens, found = self._tokenizer.tokens, []
        place = self._first_from(start)
        while place < len(self._sorted) and (piece := tokens[self._sorted[place]]).startswith(start):
            if len(piece) == len(start):
                place += 1
                continue
            byte = piece[len(start)]
            found.append(byte)
            place = len(self._sorted) if byte == 255 else self._first_from(start + bytes((byte + 1,)))
        return tuple(found)

    def _find_places(self, text: bytes) -> tuple[_SpanningPlace, ...] | None:
        """Finds the positions in a text from which a token may span the rest of the text and continue beyond it.

        Returns:
            The positions; None if no ids spell the text.
        """
        if sum(len(self._tokenizer.tokens[i]) for i in self._tokenizer.encode(text)) != len(text):
            return None
        places = range(max(1, len(text) - LONGEST), len(text))
        found = (_SpanningPlace(place, text[place:], self._next_bytes(text[place:])) for place in places)
        return tuple(one for one in found if one.bytes_after)

    def _find_crossing(self, text: bytes, start: bytes) -> bool:
        """Returns True if a token that begins with ``start`` may follow the ids of ``text`` without changing them.

        Also True if that cannot be determined, or takes too many tries.
        """
        ids = self._tokenizer.encode(text)
        for count, token in enumerate(self._starting_with(start)):
            whole, partial = split_whole(text + self._tokenizer.tokens[token])
            if partial or count == CANDIDATES or self._tokenizer.encode_once(whole) == (*ids, token):
                return True
        return False

    def _starting_with(self, start: bytes) -> Iterator[int]:
        """Yields the ids of the tokens that begin with ``start``, in byte order."""
        for place in range(self._first_from(start), len(self._sorted)):
            token = self._sorted[place]
            if not self._tokenizer.tokens[token].startswith(start):
                return
            yield token

    def _first_from(self, start: bytes) -> int:
        return bisect_left(self._sorted, start, key=self._tokenizer.tokens.__getitem__)


def _find_common(found: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the longest common prefix of all sequences."""
    same = 0
    for ids in zip(*found, strict=False):
        if ids.count(ids[0]) < len(ids):
            break
        same += 1
    return found[0][:same]
