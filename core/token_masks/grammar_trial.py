"""Compiles a grammar and computes its first masks in a worker process, so that a hostile grammar can only exhaust that
process.

The library bounds most of its work, but not all: some grammars take minutes or gigabytes to compile, and a long chain
of rules overflows its stack. A worker has limits of time, memory and stack, and may crash.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trencadis.core.errors import BadRequest
from trencadis.core.json_types import JsonObject
from trencadis.core.token_masks.grammar_matcher import parser_limits
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary, open_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK = 2 << 20
"""Stack limit of the worker in bytes; ranks have at least four times as much."""
SECONDS = 1.0
"""CPU seconds that compiling may take; every rank needs them again."""
STEPS = 24
"""Number of single-byte tokens sampled after the first mask."""
SHOWN = 150
"""Longest library message in an error, in characters."""


@dataclass(frozen=True, slots=True)
class VocabularySkeleton:
    """A vocabulary that holds only the single bytes, and the control tokens at their own ids, which grammars may name.

    Args:
        size: number of ids that the model can sample.
        special: names of control tokens, by id.
        eos: ids that end a choice.
    """

    size: int
    special: dict[int, str]
    eos: list[int]

    def pack(self) -> str:
        """Returns this skeleton as JSON."""
        return json.dumps([self.size, self.special, self.eos])

    @classmethod
    def unpack(cls, text: str | bytes) -> VocabularySkeleton:
        """Parses the result of ``pack``."""
        size, special, eos = json.loads(text)
        return cls(size, {int(token): name for token, name in special.items()}, eos)

    def make_vocabulary(self) -> Vocabulary:
        """Returns the vocabulary; each byte gets one of the free ids."""
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


def try_grammar(data: bytearray, options: JsonObject) -> tuple[JsonObject, Sequence[memoryview]]:
    """Runs as a worker job: ``data`` is a grammar as ``LLMatcher`` accepts it, ``options["skeleton"]`` a packed
    ``VocabularySkeleton``.

    Returns:
        ``seconds`` spent compiling, and the number of sampled ``steps``.

    Raises:
        BadRequest: the library rejects the grammar (with its message), or compiling takes too long.
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
    """Samples up to ``STEPS`` tokens that the masks allow, varying the choice; returns how many."""
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
    """Returns the allowed id number ``step`` (cyclic), an end only if there is nothing else; None if there is none."""
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
    """Returns the library's message in one line, cut to ``SHOWN`` characters."""
    lines = text.split("<state>")[0].split("\n")
    message = " ".join(part for part in (line.strip() for line in lines) if part and not set(part) <= set("^ |"))
    return message[:SHOWN]
