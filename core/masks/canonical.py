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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from trencadis.core.masks.vocabulary import Vocabulary

CACHED = 4096
"""Short texts, and borders of forced texts, whose ids are remembered: they come again in every answer."""
SHORT = 256
"""Most bytes of a text that counts as short."""
CACHED_LONG = 8
"""Longer texts that are remembered: choices of one request begin with the same."""
TAIL = 32
"""Last ids of a long forced text, which are looked at again when the others have been drawn."""
LONGEST = 64
"""Most bytes of a token at the end of a forced text."""
CANDIDATES = 64
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
        self._short = lru_cache(CACHED)(self.encode_once)
        self._long = lru_cache(CACHED_LONG)(self.encode_once)

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

    def encode_once(self, text: bytes) -> tuple[int, ...]:
        """As ``encode``, for a text that will hardly come again."""
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


class Spelling(NamedTuple):
    """How a forced text may go on in canonical ids.

    Args:
        run: ids that come next whatever follows the text; empty: that depends on what follows.
        firsts: if there is no run, ids of parts of the text that may come next.
        crossing: whether ids may come next whose bytes hold the whole text and more.
    """

    run: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    crossing: bool = False


class TokenHealing:
    """Finds the canonical spellings of a forced text with all that the grammar may let follow.

    At the end of a forced text a canonical token may hold the beginning of what follows (``":"`` where ``":`` is
    forced), and that changes the ids before it, too. If such a token begins at some place of the text, the ids before
    that place are those of the text up to there. What is the same in all these spellings comes next whatever follows.
    """

    def __init__(self, tokenizer: CanonicalTokenizer) -> None:
        self._tokenizer = tokenizer
        special = frozenset(tokenizer.special_token_ids)
        ids = (i for i, piece in enumerate(tokenizer.tokens) if piece and i not in special)
        self._sorted = array("i", sorted(ids, key=tokenizer.tokens.__getitem__))
        self.prefixes = lru_cache(CACHED)(self._find_prefixes)
        """Ids of all tokens with which a text begins."""
        self._next_bytes = lru_cache(CACHED)(self._find_next_bytes)
        self._crosses = lru_cache(CACHED)(self._find_crossing)

    def find(self, matcher: LLMatcher, forced: bytes, last: int) -> Spelling:
        """The canonical spellings of ``forced``, which ``matcher`` forces next, after the id ``last`` (-1: none)."""
        before, own = self._spell(forced, last)
        if len(own) > TAIL:
            return Spelling(own[:-TAIL])
        follows = lru_cache(None)(lambda byte: self._may_follow(matcher, own, byte))
        found = [own]
        for place in range(max(1, len(forced) - LONGEST), len(forced)):
            rest = forced[place:]
            bytes_after = [byte for byte in self._next_bytes(rest) if follows(byte)]
            if not bytes_after:
                continue
            if 0x80 <= rest[0] < 0xC0:  # within a character: the tokenizer cannot be asked for the ids before it
                found += [(token,) for token in self.prefixes(forced)]
            elif any(self._crosses(before + forced[:place], rest + bytes((byte,))) for byte in bytes_after):
                found.append(self._behind(before, forced[:place]))
        if any(follows(byte) for byte in self._next_bytes(forced)):
            return Spelling((), tuple({one[0] for one in found}), True)
        run = _find_common(found)
        return Spelling(run) if run else Spelling((), tuple({one[0] for one in found}))

    def _spell(self, text: bytes, last: int) -> tuple[bytes, tuple[int, ...]]:
        """The ids of a text, and the bytes before it, if those of the id ``last`` change them and not that id."""
        own, encode = self._tokenizer.encode(text), self._tokenizer.encode
        if last >= 0:
            before = self._tokenizer.tokens[last]
            found = encode(before + text)
            if found[0] == last and found[1:] != own and found[1:]:
                return before, found[1:]
        return b"", own

    def _behind(self, before: bytes, text: bytes) -> tuple[int, ...]:
        """The ids of a text behind the bytes of one id, or of the text alone, if it would change that id."""
        found = self._tokenizer.encode(before + text)
        if not before:
            return found
        return found[1:] if self._tokenizer.tokens[found[0]] == before else self._tokenizer.encode(text)

    def _may_follow(self, matcher: LLMatcher, own: tuple[int, ...], byte: int) -> bool:
        """Whether the grammar may take a byte behind the forced text of ids ``own``."""
        token = self._tokenizer.byte_ids.get(byte)
        return token is None or matcher.validate_tokens([*own, token]) > len(own)

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
        """Bytes that follow ``start`` in tokens that begin with it."""
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

    def _find_crossing(self, text: bytes, start: bytes) -> bool:
        """Whether a token that begins with ``start`` may follow the ids of ``text`` and leave them as they are."""
        ids = self._tokenizer.encode(text)
        for count, token in enumerate(self._starting_with(start)):
            whole, partial = _split_whole(text + self._tokenizer.tokens[token])
            if partial or count == CANDIDATES or self._tokenizer.encode_once(whole) == (*ids, token):
                return True
        return False

    def _starting_with(self, start: bytes) -> Iterator[int]:
        """Ids of the tokens that begin with ``start``, in the order of their bytes."""
        for place in range(self._first_from(start), len(self._sorted)):
            token = self._sorted[place]
            if not self._tokenizer.tokens[token].startswith(start):
                return
            yield token

    def _first_from(self, start: bytes) -> int:
        return bisect_left(self._sorted, start, key=self._tokenizer.tokens.__getitem__)


def _find_common(found: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ids with which all sequences begin."""
    same = 0
    for ids in zip(*found, strict=False):
        if ids.count(ids[0]) < len(ids):
            break
        same += 1
    return found[0][:same]


def _split_whole(text: bytes) -> tuple[bytes, bytes]:
    """A text as far as it is UTF-8, and the rest: bytes of a character that is cut, and whatever follows them."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start], text[error.start :]
    return text, b""
