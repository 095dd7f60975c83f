"""Canonical ids: those that the model's own tokenizer makes of a text. Grammars force these and no other spelling.

A model was trained on canonical ids. Where a grammar forces a text, every spelling of it by shorter tokens would be
slower, would count more tokens, and is one that the model has hardly ever seen. Torch-free.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

CACHED = 4096
"""Short texts, and borders of forced texts, whose ids are remembered: they come again in every answer."""
SHORT = 256
"""Most bytes of a text that counts as short."""
CACHED_LONG = 8
"""Longer texts that are remembered: choices of one request begin with the same."""


class CanonicalTokenizer:
    """Turns text into ids for ``LLTokenizer``, and says whether they are the model's own.

    Without the model's tokenizer a text becomes one token a byte. That is enough to see what a grammar takes; where it
    forces a text, its masks then hold no token of more than a byte.

    Args:
        tokens: the bytes of each id; empty where an id has none.
        special: control tokens.
        eos: ids that end a choice.
        packed: the model's tokenizer, as a compressed (zlib) tokenizer.json; empty: there is none.
    """

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], packed: bytes = b""
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos[0]
        self._special = frozenset(special)
        self.byte_ids = {t[0]: i for i, t in enumerate(tokens) if len(t) == 1 and i not in self._special}
        self._encoder: Any = None
        if packed:
            from tokenizers import Tokenizer

            self._encoder = Tokenizer.from_str(zlib.decompress(packed).decode())
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
        whole, partial = split_whole(text)
        try:
            found = self._encoder.encode(whole.decode(), add_special_tokens=False).ids
        except Exception:  # the library's own, where a vocabulary lacks a character and has no token for that
            found = []
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


def split_whole(text: bytes) -> tuple[bytes, bytes]:
    """A text as far as it is UTF-8, and the rest: bytes of a character that is cut, and whatever follows them."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start], text[error.start :]
    return text, b""
