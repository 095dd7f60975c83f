"""Makes the vocabulary of grammars from a tokenizer."""

from __future__ import annotations

import zlib
from collections.abc import Collection

from trencadis.core.masks.grammar_trial import VocabularySkeleton
from trencadis.core.masks.vocabulary import Vocabulary
from trencadis.server.text.checkpoint_tokenizer import MARKUP, Tokenizer

LEVEL = 1
"""Compression level: half the bytes of a tokenizer in a third of the time of the default level."""


def find_control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns tokens that text of a grammar never matches: the special ones, and added ones that mark structure."""
    marks = {text: token for text, token in tokenizer.added.items() if MARKUP.fullmatch(text)}
    return {text: token for text, token in (marks | tokenizer.special).items() if text}


def make_vocabulary(tokenizer: Tokenizer, size: int, eos: Collection[int]) -> Vocabulary:
    """Returns the bytes of each of a model's ``size`` ids, and its tokenizer. Takes seconds if large: run it in a
    thread.
    """
    control = set(find_control_tokens(tokenizer).values())
    tokens = [tokenizer.get_token_bytes(i) if i < tokenizer.vocab_size or i in control else b"" for i in range(size)]
    special = sorted({i for i in (*control, *eos) if i < size})
    for token in special:
        # A control token without a name could never be drawn, not even to end a text.
        tokens[token] = tokens[token] or b"<|%d|>" % token
    spelling = zlib.compress(tokenizer.spell_parts(find_control_tokens(tokenizer)).encode(), LEVEL)
    return Vocabulary(tokens, special, sorted(i for i in eos if i < size), spelling)


def make_skeleton(tokenizer: Tokenizer, size: int, eos: Collection[int]) -> VocabularySkeleton:
    """Returns the same without words, for trial compilations."""
    named = {token: text for text, token in find_control_tokens(tokenizer).items() if token < size}
    named |= {token: f"<|{token}|>" for token in eos if token not in named and token < size}
    return VocabularySkeleton(size, named, sorted(i for i in eos if i < size))
