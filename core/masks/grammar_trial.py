"""Compiles a grammar and computes its first masks in a worker process, so that a hostile grammar can only exhaust that
process.

The library is fast and bounds most of its work, but not all: some grammars take minutes or gigabytes to compile, and a
long chain of rules overflows its stack. A worker has limits of time, memory and stack, and may die.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trencadis.core.errors import BadRequest
from trencadis.core.masks.grammar_matcher import parser_limits
from trencadis.core.masks.vocabulary import Vocabulary, open_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK = 2 << 20
"""Bytes of stack here; ranks have at least four times as much."""
SECONDS = 1.0
"""CPU seconds that compiling may take; every rank takes them again."""
STEPS = 24
"""Tokens of a byte each that are drawn after the first mask."""
SHOWN = 150
"""Most characters of the library's words in an error."""


@dataclass(frozen=True, slots=True)
class VocabularySkeleton:
    """A vocabulary without words: the bytes, and control tokens at their own ids, where grammars name them.

    Args:
        size: ids that the model can draw.
        special: names of control tokens, by id.
        eos: ids that end a choice.
    """

    size: int
    special: dict[int, str]
    eos: list[int]

    def pack(self) -> str:
        """This skeleton as one JSON text."""
        return json.dumps([self.size, self.special, self.eos])

    @classmethod
    def unpack(cls, text: str | bytes) -> VocabularySkeleton:
        """The skeleton that ``pack`` made ``text`` of."""
        size, special, eos = json.loads(text)
        return cls(size, {int(token): name for token, name in special.items()}, eos)

    def make_vocabulary(self) -> Vocabulary:
        """The vocabulary, in which each byte has one of the ids that are left."""
        tokens = [b""] * max(self.size, len(self.special) + 256)
        for token, name in self.special.items():
            tokens[token] = name.encode()
        free = (i for i in range(len(tokens)) if i not in self.special and i not in self.eos)
        for byte, token in zip(range(256), free, strict=False):
            tokens[token] = bytes([byte])
        return Vocabulary(tokens, sorted(self.special), self.eos)


@lru_cache(maxsize=4)
def _open_tokenizer(packed: bytes) -> LLTokenizer:
    return open_tokenizer(VocabularySkeleton.unpack(packed).make_vocabulary())


def try_grammar(data: bytearray, options: dict[str, Any]) -> tuple[dict[str, Any], Sequence[memoryview]]:
    """A worker's job: ``data`` is a grammar as ``LLMatcher`` takes it, ``options["skeleton"]`` a packed
    ``VocabularySkeleton``.

    Returns:
        ``seconds`` of compiling, ``steps`` that were drawn.

    Raises:
        BadRequest: the library refuses the grammar, in its words.
    """
    from llguidance import LLMatcher

    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, most))
    tokenizer = _open_tokenizer(options["skeleton"].encode())
    start = time.process_time()
    matcher = LLMatcher(tokenizer, data.decode(), log_level=0, limits=parser_limits())
    seconds = time.process_time() - start
    if matcher.is_error():
        raise BadRequest(shorten_message(matcher.get_error()))
    if seconds > SECONDS:
        raise BadRequest("it takes too long to compile")
    return {"seconds": seconds, "steps": _draw_steps(matcher, tokenizer.eos_tokens)}, []


def _draw_steps(matcher: LLMatcher, ends: Sequence[int]) -> int:
    """Goes some steps along tokens that the masks allow, always another one; returns how many there were."""
    for step in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise BadRequest(shorten_message(matcher.get_error()))
        token = _pick(mask, ends, 7 * step)
        if token is None:
            if not matcher.is_accepting():
                raise BadRequest("no text satisfies it")
            return step
        if not matcher.consume_token(token) or matcher.is_stopped():
            if matcher.is_error():
                raise BadRequest(shorten_message(matcher.get_error()))
            return step + 1
    return STEPS


def _pick(mask: bytes, ends: Sequence[int], step: int) -> int | None:
    """One of the allowed ids in turn, an end only if nothing else is left; None if there is none."""
    bits = int.from_bytes(mask, "little")
    inner = bits
    for token in ends:
        inner &= ~(1 << token)
    chosen = inner or bits
    indices = [i for i, byte in enumerate(chosen.to_bytes(len(mask), "little")) if byte]
    if not indices:
        return None
    index = indices[step % len(indices)]
    held = [8 * index + bit for bit in range(8) if chosen >> (8 * index + bit) & 1]
    return held[step % len(held)]


def shorten_message(text: str) -> str:
    """The library's words, in one line and cut."""
    lines = text.split("<state>")[0].split("\n")
    told = " ".join(part for part in (line.strip() for line in lines) if part and not set(part) <= set("^ |"))
    return told[:SHOWN]
