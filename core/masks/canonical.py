"""Canonical ids: those that the model's own tokenizer makes of a text. Grammars force these and no other spelling.

A model was trained on canonical ids. Where a grammar forces a text, every spelling of it by shorter tokens would be
slower, would count more tokens, and is one that the model has hardly ever seen. Torch-free.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trencadis.core.masks.matcher import remove
from trencadis.core.step import UInt8

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from trencadis.core.masks.vocabulary import Vocabulary

CACHED = 4096
"""Short texts, and borders of forced texts, whose ids are remembered: they come again in every answer."""
SHORT = 256
"""Most bytes of a text that counts as short."""
CACHED_LONG = 8
"""Longer texts that are remembered: choices of one request begin with the same."""
BORDER = 64
"""Most bytes of forced text at a border that are looked at; a longer one keeps all spellings."""
CANDIDATES = 1024
"""Most tokens that are tried for one spelling; where there are more, the spelling is kept."""


class CanonicalTokenizer:
    """Turns text into ids for ``LLTokenizer``, and says whether they are the model's own.

    Without the model's tokenizer (``Vocabulary.tokenizer`` is empty) a text becomes one token a byte. That is enough to
    see what a grammar takes; where it forces a text, its masks then hold no token of more than a byte.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids: Sequence[int] = vocabulary.special
        self.eos_token_id = vocabulary.eos[0]
        self._special = frozenset(vocabulary.special)
        self.byte_ids = {t[0]: i for i, t in enumerate(vocabulary.tokens) if len(t) == 1 and i not in self._special}
        self._encoder: Any = None
        if vocabulary.tokenizer:
            from tokenizers import Tokenizer

            self._encoder = Tokenizer.from_str(zlib.decompress(vocabulary.tokenizer).decode())
            self._encoder.no_truncation()
            self._encoder.no_padding()
        self._short = lru_cache(CACHED)(self._encode)
        self._long = lru_cache(CACHED_LONG)(self._encode)

    @property
    def canonical(self) -> bool:
        """True if the ids are those of the model's tokenizer."""
        return self._encoder is not None

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a UTF-8 text, without control tokens; their bytes are exactly the text's."""
        return list(self.encode(text))

    def encode(self, text: bytes) -> tuple[int, ...]:
        """As a call, remembered. From the first byte that belongs to no whole character, there is one id a byte."""
        return self._short(text) if len(text) <= SHORT else self._long(text)

    def _encode(self, text: bytes) -> tuple[int, ...]:
        if self._encoder is None:
            return tuple(self._bytewise(text))
        whole, partial = _split_whole(text)
        found = self._encoder.encode(whole.decode(), add_special_tokens=False).ids
        return (*self._spell(whole, found), *self._bytewise(partial))

    def _spell(self, text: bytes, found: Sequence[int]) -> Iterator[int]:
        """``found`` where they spell ``text``; bytes for a control token's name, and from where they spell another."""
        at = 0
        for token in found:
            piece = self.tokens[token] if token < len(self.tokens) else b""
            if not piece or not text.startswith(piece, at):
                break
            if token in self._special:
                yield from self._bytewise(piece)
            else:
                yield token
            at += len(piece)
        yield from self._bytewise(text[at:])

    def _bytewise(self, text: bytes) -> Iterator[int]:
        return (self.byte_ids[byte] for byte in text if byte in self.byte_ids)


class HealingFilter:
    """Removes spellings that no canonical text has from masks at the border of forced and free text.

    There a canonical token may hold the end of the forced text and the beginning of the free one (``":"`` where ``":``
    is forced), so that the library forces no token: its mask holds every token that begins with the whole of the forced
    rest, and every prefix of that rest. Of the prefixes most are never canonical, whatever follows.
    """

    def __init__(self, tokenizer: CanonicalTokenizer) -> None:
        self._tokenizer = tokenizer
        special = frozenset(tokenizer.special_token_ids)
        ids = (i for i, piece in enumerate(tokenizer.tokens) if piece and i not in special)
        self._sorted = array("i", sorted(ids, key=tokenizer.tokens.__getitem__))
        self._doubtful = lru_cache(CACHED)(self._find_doubtful)
        self._crossing = lru_cache(CACHED)(self._find_crossing)

    def restrict(self, row: UInt8, matcher: LLMatcher, last: int) -> None:
        """Removes ids from ``row``, the mask of ``matcher``, which has just accepted the id ``last`` (-1: none)."""
        forced = matcher.compute_ff_bytes()
        if not 0 < len(forced) <= BORDER:
            return
        doubtful = self._doubtful(forced)
        if not doubtful:
            return
        own = self._tokenizer.encode(forced)
        kept = own[0] if last < 0 else self._next_in_context(forced, last)
        follows: dict[int, bool] = {}
        for token, firsts in doubtful:
            if token == kept:
                continue
            for byte in firsts:
                if byte not in follows:
                    follows[byte] = matcher.validate_tokens([*own, byte]) > len(own)
                if follows[byte]:
                    break
            else:
                remove(row, (token,))

    def _next_in_context(self, forced: bytes, last: int) -> int:
        """The id with which the forced text begins behind ``last``, if that id stays what it is; -1: it does not."""
        found = self._tokenizer.encode(self._tokenizer.tokens[last] + forced)
        return found[1] if len(found) > 1 and found[0] == last else -1

    def _find_doubtful(self, forced: bytes) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Ids with which a canonical text would not begin if it were ``forced`` alone.

        Each has the ids of single bytes behind ``forced`` with which it would. Ids without a bound on them are left out.
        """
        tokens, own = self._tokenizer.tokens, self._tokenizer.encode(forced)[0]
        found = []
        for length in range(1, len(forced) + 1):
            rest = forced[length:]
            for token in self._starting_with(forced[:length], exact=True):
                if token == own:
                    continue
                if tokens[token] == tokens[own]:
                    found.append((token, ()))  # a second id of the same bytes
                elif rest and (firsts := self._crossing(token, rest)) is not None:
                    found.append((token, firsts))
        return tuple(found)

    def _find_crossing(self, token: int, rest: bytes) -> tuple[int, ...] | None:
        """Ids of the bytes after ``rest`` with which ``token``, ``rest`` may be canonical; None: any.

        They are the next bytes of tokens that hold the end of ``rest`` and go on, in a canonical spelling from ``token``.
        """
        tokens, byte_ids = self._tokenizer.tokens, self._tokenizer.byte_ids
        firsts: dict[int, None] = {}
        for count, other in enumerate(self._starting_with(rest)):
            if count == CANDIDATES:
                return None
            if len(tokens[other]) > len(rest):
                byte = byte_ids.get(tokens[other][len(rest)])
                if byte is None:
                    return None
                if byte not in firsts and self._may_follow(token, other):
                    firsts[byte] = None
        for length in range(1, len(rest)):
            for other in self._starting_with(rest[:length], exact=True):
                if self._may_follow(token, other):
                    more = self._crossing(other, rest[length:])
                    if more is None:
                        return None
                    firsts |= dict.fromkeys(more)
        return tuple(firsts)

    def _may_follow(self, token: int, other: int) -> bool:
        """True if ``other`` follows ``token`` in the canonical ids of their text, or if that cannot be known."""
        text = self._tokenizer.tokens[token] + self._tokenizer.tokens[other]
        return bool(_split_whole(text)[1]) or self._tokenizer.encode(text) == (token, other)

    def _starting_with(self, start: bytes, exact: bool = False) -> Iterator[int]:
        """Ids of the tokens that begin with ``start``, or of those alone that are it."""
        tokens = self._tokenizer.tokens
        for place in range(bisect_left(self._sorted, start, key=tokens.__getitem__), len(self._sorted)):
            token = self._sorted[place]
            if tokens[token] != start and (exact or not tokens[token].startswith(start)):
                return
            yield token


def _split_whole(text: bytes) -> tuple[bytes, bytes]:
    """A text as far as it is UTF-8, and the rest: bytes of a character that is cut, and whatever follows them."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start], text[error.start :]
    return text, b""
