"""The bytes of each token id."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer

from trencadis.core.json_types import JsonObject

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def make_byte_alphabet() -> dict[str, int]:
    """Returns the characters that stand for bytes in a byte-level vocabulary: printable Latin-1 as itself, else from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def decode_sentencepiece(text: str) -> bytes:
    """Returns the bytes of a SentencePiece token."""
    match = BYTE_TOKEN.match(text)
    return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode()


class TokenBytes:
    """The bytes of token ids.

    ``byte_level``: a text is exactly the concatenation of its tokens' bytes (GPT-2, Qwen, Llama 3). Otherwise
    (SentencePiece) the bytes are those of the token alone, which is enough for log-probabilities.
    """

    def __init__(self, raw: Tokenizer, spec: JsonObject, special: frozenset[int]) -> None:
        self._raw = raw
        self._alphabet = make_byte_alphabet()
        self._special = special
        self.bytes_of: Callable[[int], bytes] = cache(self._bytes)
        """The bytes of one id; empty for an id without a text."""
        self.text_of: Callable[[int], str | None] = cache(self._text)
        """The text of one id; None for a special one, and for bytes that are no whole characters."""
        self.byte_level = (spec.get("decoder") or {}).get("type") == "ByteLevel"

    def _bytes(self, token: int) -> bytes:
        text = self._raw.id_to_token(token)
        if text is None:
            return b""
        if self.byte_level:
            values = [self._alphabet.get(c) for c in text]
            # If an added token has a character outside the alphabet, the library takes the whole token literally.
            return text.encode() if None in values else bytes(v for v in values if v is not None)
        return text.encode() if token in self._special else decode_sentencepiece(text)

    def _text(self, token: int) -> str | None:
        if token in self._special:
            return None
        try:
            return self.bytes_of(token).decode()
        except UnicodeDecodeError:
            return None

    def is_special(self, token: int) -> bool:
        """Returns True if ``skip_special_tokens`` drops the token."""
        return token in self._special
