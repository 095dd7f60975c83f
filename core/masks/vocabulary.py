"""The bytes of every token, as grammars need them: packed in the API process, sent once to each rank, opened there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as a grammar sees it.

    Args:
        tokens: the bytes of each id that the model can draw; empty where an id has none, which is then never drawn.
        special: control tokens by their names as bytes; no text of a grammar matches them, only ``<name>`` does.
        eos: ids that end a choice.
    """

    tokens: list[bytes]
    special: list[int]
    eos: list[int]

    def packed(self) -> bytes:
        """This vocabulary as one message."""
        import msgspec  # an offline engine of one rank does without it

        return msgspec.msgpack.encode(self)

    @classmethod
    def unpacked(cls, data: bytes | bytearray | memoryview) -> Vocabulary:
        """The vocabulary that ``packed`` made ``data`` of."""
        import msgspec

        return msgspec.msgpack.decode(data, type=cls)


class _Bytes:
    """What ``LLTokenizer`` asks of a tokenizer: text becomes one token a byte.

    The library tokenizes only what a grammar forces, to know whether a mask may hold longer tokens than that; masks are
    the same as with the model's own tokenizer, which would have to be loaded in every rank.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids: Sequence[int] = vocabulary.special
        self.eos_token_id = vocabulary.eos[0]
        special = frozenset(vocabulary.special)
        self._ids = {t[0]: i for i, t in enumerate(vocabulary.tokens) if len(t) == 1 and i not in special}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text if byte in self._ids]


def opened(vocabulary: Vocabulary) -> LLTokenizer:
    """The library's tokenizer of a vocabulary: 1 to 4 s and 74 MB for 151,936 ids, so a thread makes it, once."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(vocabulary)), eos_token=vocabulary.eos)
