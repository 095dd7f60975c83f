"""Incremental detokenization: emits text as soon as it is certain; the pieces join to the full decode."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from functools import partial
from typing import Protocol

from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.text.token_bytes import TokenBytes

NO_IDS: Set[int] = frozenset()
REPLACEMENT = "�"


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text that ``tokens`` made certain."""
        ...

    def finish(self) -> str:
        """Returns the text still held back when the choice ends."""
        ...


class DetokenizerMaker(Protocol):
    """Makes the detokenizer of one choice.

    Args:
        prompt: ids of the prompt; they matter only if texts depend on the tokens before them.
        shown: special tokens that are not skipped, because a parser reads them.
    """

    def __call__(
        self, prompt: Sequence[int] = (), skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Makes the detokenizer."""
        ...


def make_detokenizers(tokenizer: Tokenizer) -> DetokenizerMaker:
    """Returns the maker of detokenizers for a vocabulary."""
    if tokenizer.pieces.byte_level:
        return partial(ByteDetokenizer, tokenizer.pieces)
    return partial(WindowDetokenizer, tokenizer)


class ByteDetokenizer:
    """Detokenizer for byte-level vocabularies; holds back the bytes of an unfinished character."""

    def __init__(
        self,
        pieces: TokenBytes,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Set[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text that ``tokens`` made certain."""
        pieces = self._pieces
        if len(tokens) == 1 and not self._utf8.buffer:
            text = pieces.text_of(tokens[0])
            if text is not None:
                return text
        kept = (t for t in tokens if not (self._skip and pieces.is_special(t)) or t in self._shown)
        return self._utf8.decode(b"".join(pieces.bytes_of(t) for t in kept))

    def finish(self) -> str:
        """Returns the rest; bytes of an unfinished character become U+FFFD."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for vocabularies whose decoder looks at neighbours: decodes a short window twice and emits the
    difference.

    The window starts a few tokens before the first token without emitted text, so the cost per token is constant.
    """

    CONTEXT = 6

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        # The library skips all special tokens or none, so those that are not shown are dropped before.
        self._skip = skip_special_tokens and not shown
        self._dropped = tokenizer.special_ids - shown if skip_special_tokens and shown else frozenset()
        self._tokens = list(prompt[-self.CONTEXT :])
        self._start = 0
        self._read = len(self._tokens)

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text that ``tokens`` made certain."""
        return "".join(self._one(t) for t in tokens if t not in self._dropped)

    def finish(self) -> str:
        """Returns the rest of the window."""
        return self._advance(self._window(self._start, len(self._tokens)))

    def _one(self, token: int) -> str:
        self._tokens.append(token)
        text = self._window(self._start, len(self._tokens))
        return "" if text.endswith(REPLACEMENT) else self._advance(text)

    def _advance(self, text: str) -> str:
        out = text[len(self._window(self._start, self._read)) :]
        self._start, self._read = self._read, len(self._tokens)
        return out

    def _window(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], self._skip)
