"""The bytes of every token, for grammars: packed in the API process, sent once to each rank, decoded there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trencadis.core.masks.canonical import CanonicalTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


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
