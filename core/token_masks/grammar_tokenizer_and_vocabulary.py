"""Canonical token ids: those that the model's own tokenizer produces for a text. Grammars force only this spelling.

Models are trained on canonical ids. If a grammar forces a text, any spelling by shorter tokens would be slower, count
more tokens, and be one that the model has hardly ever seen. Torch-free.

The bytes of every token, for grammars: packed in the API process, sent once to each rank, decoded there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer


CACHED = 4096
"""Number of short texts, and of borders of forced texts, whose ids are cached: they recur in every answer."""
SHORT = 256
"""Largest length in bytes of a text that counts as short."""
CACHED_LONG = 8
"""Number of longer texts that are cached: choices of one request begin with the same text."""


class CanonicalTokenizer:
    """Converts text to ids for ``LLTokenizer``; ``canonical`` tells if they are those of the model's tokenizer.

    Without the model's tokenizer a text becomes one token per byte. That is enough to check what a grammar accepts, but
    masks in a forced text then contain only single-byte tokens.

    Args:
        tokens: the bytes of each id; empty if an id has none.
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
        """Returns the ids of a UTF-8 text, without control tokens; their bytes are exactly the text's."""
        return list(self.encode(text))

    def encode(self, text: bytes) -> tuple[int, ...]:
        """Returns the ids of a text, cached. From the first incomplete UTF-8 character on, each byte is one id."""
        return self._short(text) if len(text) <= SHORT else self._long(text)

    def encode_once(self, text: bytes) -> tuple[int, ...]:
        """Returns the ids of a text without caching them."""
        if self._encoder is None:
            return tuple(self._bytewise(text))
        whole, partial = split_whole(text)
        try:
            found = self._encoder.encode(whole.decode(), add_special_tokens=False).ids
        except Exception:  # raised by the library if a vocabulary has neither a character nor an unknown token
            found = []
        return (*self._spell(whole, found), *self._bytewise(partial))

    def _spell(self, text: bytes, found: Sequence[int]) -> Iterator[int]:
        """Yields ``found`` as far as they spell ``text``.

        Byte ids for a control token's name, and after the first difference.
        """
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
    """Splits a text into its valid UTF-8 prefix and the rest, which begins with an incomplete character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start], text[error.start :]
    return text, b""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer in the form that grammars need.

    Args:
        tokens: the bytes of each id that the model can sample; ids with empty bytes are never sampled.
        special: control tokens, whose bytes are their names; they match only ``<name>`` in a grammar, no text.
        eos: ids that end a choice.
        tokenizer: the model's tokenizer for plain text, as a compressed (zlib) tokenizer.json; empty: there is none,
            and a text that a grammar forces is spelled with one token per byte.
    """

    tokens: list[bytes]
    special: list[int]
    eos: list[int]
    tokenizer: bytes = b""

    def pack(self) -> bytes:
        """Encodes this vocabulary as one message."""
        import msgspec  # an offline engine of one rank does without it

        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Vocabulary:
        """Decodes the result of ``pack``."""
        import msgspec

        return msgspec.msgpack.decode(data, type=cls)

    def open_tokenizer(self) -> CanonicalTokenizer:
        """Creates the tokenizer of texts; takes a second for 151,936 ids."""
        return CanonicalTokenizer(self.tokens, self.special, self.eos, self.tokenizer)


def open_tokenizer(vocabulary: Vocabulary, tokenizer: CanonicalTokenizer | None = None) -> LLTokenizer:
    """Creates the library's tokenizer. It takes a second and 74 MB for 151,936 ids, so it is done once, in a thread.

    Args:
        tokenizer: the tokenizer of this vocabulary, if it exists already.
    """
    import llguidance

    made = vocabulary.open_tokenizer() if tokenizer is None else tokenizer
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(made), eos_token=vocabulary.eos)
