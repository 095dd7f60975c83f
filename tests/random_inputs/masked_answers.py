"""Answers that are drawn under a rank's masks, and in how many ids they write what their grammar forces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.random_inputs.grammar_draws import GrammarDraws
from tests.random_inputs.random_schemas import REAL, random_schema
from trencadis.core.errors import BadRequest
from trencadis.core.token_masks.grammar_matcher import CompiledGrammars
from trencadis.server.grammars.lark_grammar_and_tool_functions import WhitespaceRule
from trencadis.server.grammars.response_format import RequestedFormat
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SIZE = 20_000


def open_large_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE of 20,000 entries, trained on the repository's documentation and source, and on compact JSON."""
    files = [
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("docs/design/*.md")),
        *sorted(ROOT.glob("core/**/*.py")),
    ]
    texts = [file.read_text(encoding="utf-8") for file in files]
    texts += [json.dumps(schema_at(number), separators=(",", ":")) for number in range(2000)]
    return Tokenizer.from_checkpoint(write_text_checkpoint(folder, texts=texts, size=SIZE))


def schema_at(number: int) -> dict[str, Any]:
    """A schema of the corpus: those of real tools, then random ones."""
    return REAL[number] if number < len(REAL) else random_schema(random.Random(number - len(REAL)))


def write_grammars(draws: GrammarDraws, count: int) -> Iterator[tuple[int, str]]:
    """Numbers and grammars of the first schemas of the corpus that have one; odd ones have no blanks."""
    for number in range(count):
        try:
            asked = RequestedFormat(
                "json", schema_at(number), "schema", spaces=WhitespaceRule("") if number % 2 else WhitespaceRule()
            )
            grammar = draws.written(asked)
            draws.matcher(grammar)
        except BadRequest:
            continue
        yield number, grammar


@dataclass
class Spellings:
    """Counts over answers.

    ``drawn`` and ``own``: ids of forced text, where an id that holds other text, too, counts in part. ``own`` is what
    the tokenizer would have written behind the ids that were there already.
    """

    answers: int = 0
    forced: int = 0
    drawn: float = 0.0
    own: float = 0.0
    refused: list[str] = field(default_factory=list)
    """Texts whose canonical ids a mask did not hold."""

    def __str__(self) -> str:
        return (
            f"{self.answers} answers, {self.forced} forced bytes in {self.drawn:.0f} ids, the tokenizer's own "
            f"{self.own:.0f} (ratio {self.drawn / max(1e-9, self.own):.4f}), refused: {len(self.refused)}"
        )


@dataclass
class MaskedDraws:
    """A rank's matchers over the vocabulary of ``draws``, and a model that knows nothing.

    Args:
        canonical: whether the rank has the model's tokenizer.
    """

    draws: GrammarDraws
    canonical: bool = True

    @cached_property
    def grammars(self) -> CompiledGrammars:
        made, words = CompiledGrammars(), self.draws.vocabulary
        made.set_vocabulary((words if self.canonical else replace(words, tokenizer=b"")).pack())
        return made

    @cached_property
    def scores(self) -> Any:
        """What a model that always prefers the same ids thinks of them."""
        return np.random.default_rng(5).random(len(self.draws.vocabulary.tokens))

    @cached_property
    def closing(self) -> Any:
        """For each id whether it closes a text, as many of JSON's marks do."""
        return np.array([piece[:1] in b'"}],' and bool(piece) for piece in self.draws.vocabulary.tokens])

    @cached_property
    def ends(self) -> Any:
        return np.isin(np.arange(len(self.draws.vocabulary.tokens)), self.draws.vocabulary.eos)

    def encode(self, text: bytes) -> list[int]:
        """The tokenizer's own ids."""
        return self.draws.tokenizer.encode(text.decode(), allow_special=False)

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(self.draws.vocabulary.tokens[i] for i in ids)

    def mask(self, matcher: Any) -> Any:
        """The next mask: for each id whether it is allowed."""
        size = len(self.draws.vocabulary.tokens)
        row = np.full(-(-size // 8), 255, np.uint8)
        matcher.restrict(row)
        assert not matcher.error, matcher.error
        return np.unpackbits(row, bitorder="little")[:size].astype(bool)

    def allowed(self, matcher: Any) -> list[int]:
        """The ids of the next mask."""
        return [int(i) for i in np.flatnonzero(self.mask(matcher))]

    def answer(self, matcher: Any, seed: int, greedy: bool, most: int = 300) -> list[int] | None:
        """Ids of an answer without its end; None if it has not ended after ``most`` of them.

        What closes a text is drawn more often than chance would have it, or most would never end.
        """
        rng, ids = random.Random(seed), list[int]()
        while len(ids) < most:
            mask = self.mask(matcher)
            inner = np.flatnonzero(mask & ~self.ends)
            if not len(inner) or (mask[self.ends].any() and rng.random() < 0.3):
                return ids
            closing = inner[self.closing[inner]]
            some = closing if len(closing) and rng.random() < 0.4 else inner
            token = int(some[self.scores[some].argmax()] if greedy else some[rng.randrange(len(some))])
            assert matcher.accept(token), matcher.error
            ids.append(token)
        return None

    def find_forced(self, grammar: str, text: bytes) -> list[bool]:
        """For each byte of a text whether the grammar forces it."""
        matcher, flags = self.draws.matcher(grammar), list[bool]()
        while len(flags) < len(text):
            forced = len(matcher.compute_ff_bytes())
            piece = text[len(flags) : len(flags) + max(1, forced)]
            assert matcher.consume_tokens([self.draws.bytes[byte] for byte in piece])
            flags += [forced > 0] * len(piece)
        return flags

    def find_refused(self, grammar: str, ids: list[int]) -> int:
        """The first place at which a mask does not hold the next of ``ids``; -1: there is none."""
        matcher = self.grammars.matcher(grammar)
        for place, token in enumerate(ids):
            if not self.mask(matcher)[token]:
                return place
            assert matcher.accept(token)
        return -1

    def count(self, grammars: list[tuple[int, str]], greedy: bool) -> Spellings:
        """Draws an answer of each grammar and compares it with what the tokenizer makes of its text."""
        found = Spellings()
        for number, grammar in grammars:
            ids = self.answer(self.grammars.matcher(grammar), number, greedy)
            if ids is not None:
                self.compare(grammar, ids, found)
        return found

    def compare(self, grammar: str, ids: list[int], found: Spellings) -> None:
        """Adds one answer, unless it ends within a character or is a text that the tokenizer cannot write."""
        text = self.decode(ids)
        if not _is_text(text) or self.decode(own := self.encode(text)) != text:
            return
        found.answers += 1
        if self.find_refused(grammar, own) >= 0:
            found.refused.append(text.decode())
        self._add_runs(ids, text, self.find_forced(grammar, text), found)

    def _add_runs(self, ids: list[int], text: bytes, forced: list[bool], found: Spellings) -> None:
        """Adds the ids of each run of forced bytes, from the first id that begins within it."""
        starts = np.cumsum([0, *(len(self.draws.vocabulary.tokens[i]) for i in ids)]).tolist()
        end = 0
        while True in forced[end:]:
            start = forced.index(True, end)
            end = forced.index(False, start) if False in forced[start:] else len(forced)
            first = next((k for k, at in enumerate(starts[:-1]) if start <= at < end), None)
            if first is None or not _is_text(text[starts[first] :]):
                continue
            at = starts[first]
            found.forced += end - at
            found.drawn += self._weigh(ids[first:], end - at)
            found.own += self._weigh(self.encode(text[at:]), end - at)

    def _weigh(self, ids: list[int], size: int) -> float:
        """How many ids the first ``size`` bytes take; an id that goes on behind them counts in part."""
        total = 0.0
        for token in ids:
            length = len(self.draws.vocabulary.tokens[token])
            total += min(length, max(0, size)) / length
            size -= length
        return total


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
