"""The bytes of every token, as grammars need them: packed in the API process, sent once to each rank, opened there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trencadis.core.masks.canonical import CanonicalTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as a grammar sees it.

    Args:
        tokens: the bytes of each id that the model can draw; empty where an id has none, which is then never drawn.
        special: control tokens by their names as bytes; no text of a grammar matches them, only ``<name>`` does.
        eos: ids that end a choice.
        tokenizer: the model's tokenizer for plain text, as a compressed (zlib) tokenizer.json; empty: there is none,
            and masks hold one token a byte where a grammar forces the text.
    """

    tokens: list[bytes]
    special: list[int]
    eos: list[int]
    tokenizer: bytes = b""

    def pack(self) -> bytes:
        """This vocabulary as one message."""
        import msgspec  # an offline engine of one rank does without it

        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Vocabulary:
        """The vocabulary that ``pack`` made ``data`` of."""
        import msgspec

        return msgspec.msgpack.decode(data, type=cls)

    def open_tokenizer(self) -> CanonicalTokenizer:
        """The tokenizer of texts; a second for 151,936 ids."""
        return CanonicalTokenizer(self.tokens, self.special, self.eos, self.tokenizer)


def open_tokenizer(vocabulary: Vocabulary, tokenizer: CanonicalTokenizer | None = None) -> LLTokenizer:
    """The library's tokenizer of a vocabulary: a second and 74 MB for 151,936 ids, so a thread makes it, once.

    Args:
        tokenizer: that of this vocabulary, if it is there already.
    """
    import llguidance

    made = vocabulary.open_tokenizer() if tokenizer is None else tokenizer
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(made), eos_token=vocabulary.eos)
