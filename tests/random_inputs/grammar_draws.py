"""Texts of grammars: drawn at random under a matcher's masks, and tried byte by byte."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import jsonschema
import llguidance
import numpy as np

from trencadis.core.errors import BadRequest
from trencadis.core.token_masks.grammar_matcher import parser_limits
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary, open_tokenizer
from trencadis.server.grammars.grammar_cache import find_control_tokens, make_vocabulary
from trencadis.server.grammars.lark_grammar_and_tool_functions import GrammarWriter
from trencadis.server.grammars.response_format import RequestedFormat
from trencadis.server.prompts.answer_grammar import write_content_rule
from trencadis.server.text.checkpoint_tokenizer import Tokenizer


@dataclass
class GrammarDraws:
    """Matchers over a tokenizer's vocabulary."""

    tokenizer: Tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return make_vocabulary(self.tokenizer, self.tokenizer.vocab_size, [self.tokenizer.eos or 0])

    @cached_property
    def library(self) -> llguidance.LLTokenizer:
        return open_tokenizer(self.vocabulary)

    @cached_property
    def bytes(self) -> dict[int, int]:
        special = set(self.vocabulary.special)
        return {t[0]: i for i, t in enumerate(self.vocabulary.tokens) if len(t) == 1 and i not in special}

    @cached_property
    def control(self) -> dict[str, int]:
        return find_control_tokens(self.tokenizer)

    def writer(self) -> GrammarWriter:
        return GrammarWriter(self.control)

    def written(self, requested: RequestedFormat) -> str:
        """The grammar of a form of answer, with nothing around it."""
        writer = self.writer()
        return writer.write_grammar(write_content_rule(requested, writer))

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        found = llguidance.LLMatcher(self.library, grammar, log_level=0, limits=parser_limits())
        if found.is_error():
            raise BadRequest(found.get_error()[:300])
        return found

    def accepts(self, grammar: str | llguidance.LLMatcher, text: str) -> bool:
        """Whether a text is one of the grammar's; control tokens in it count as tokens."""
        matcher = self.matcher(grammar) if isinstance(grammar, str) else grammar.deep_copy()
        pieces = GrammarWriter(self.control)._split
        for part in pieces.split(text) if pieces else [text]:
            ids = [self.control[part]] if part in self.control else [self.bytes[b] for b in part.encode()]
            if ids and not matcher.consume_tokens(ids):
                return False
        return matcher.is_accepting()

    def draw(self, grammar: str | llguidance.LLMatcher, seed: int, most: int = 400) -> str | None:
        """A text of the grammar, at random; None if it has not ended after ``most`` tokens."""
        matcher = self.matcher(grammar) if isinstance(grammar, str) else grammar.deep_copy()
        rng = random.Random(seed)
        ends = set(self.vocabulary.eos)
        out: list[int] = []
        while len(out) < most:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            assert not matcher.is_error(), matcher.get_error()
            assert len(ids), "no token may follow"
            inner = [int(i) for i in ids if i not in ends]
            closing = [i for i in inner if self.vocabulary.tokens[i][:1] in b'"}],']
            if len(inner) < len(ids) and (not inner or rng.random() < 0.2):
                return self.text(out)
            # Closing marks more often than chance would have them, or most texts would never end.
            token = rng.choice(closing if closing and rng.random() < 0.4 else inner)
            assert matcher.consume_token(token), matcher.get_error()
            out.append(token)
        return None

    def text(self, ids: list[int]) -> str:
        """The text of ids; control tokens by their names."""
        names = {i: text for text, i in self.control.items()}
        return b"".join(names[i].encode() if i in names else self.vocabulary.tokens[i] for i in ids).decode()


def in_order(value: Any, schema: Any, root: Any = None) -> Any:
    """A value whose keys stand as a grammar writes them: those that the schema lists first, in its order."""
    root = schema if root is None else root
    parts = list(_parts(value, schema, root))
    if isinstance(value, dict):
        held: dict[str, list[Any]] = {}
        for part in parts:
            for name, inner in part.get("properties", {}).items():
                held.setdefault(name, []).append(inner)
        for part in parts:
            for name in part.get("required", []):
                held.setdefault(name, [part.get("additionalProperties", True)])
        first = {k: in_order(value[k], {"allOf": inner}, root) for k, inner in held.items() if k in value}
        more = {"allOf": [part.get("additionalProperties", True) for part in parts]}
        return first | {k: in_order(v, more, root) for k, v in value.items() if k not in held}
    if isinstance(value, list):
        return [in_order(one, {"allOf": list(_items(parts, i))}, root) for i, one in enumerate(value)]
    return value


def _parts(value: Any, schema: Any, root: Any) -> Iterator[dict[str, Any]]:
    """The schemas that hold for a value: this one, what it refers to, all of ``allOf``, a branch that it fits."""
    if not isinstance(schema, dict):
        return
    if schema.get("$ref", "").startswith("#/"):
        target = root
        for part in schema["$ref"][2:].split("/"):
            target = target[part]
        yield from _parts(value, target, root)
    yield schema
    for part in schema.get("allOf", []):
        yield from _parts(value, part, root)
    for branch in (*schema.get("anyOf", []), *schema.get("oneOf", [])):
        if jsonschema.Draft202012Validator({"$defs": root.get("$defs", {}), "allOf": [branch]}).is_valid(value):
            yield from _parts(value, branch, root)
            break


def _items(parts: list[dict[str, Any]], place: int) -> Iterator[Any]:
    for part in parts:
        heads = part.get("prefixItems", [])
        yield heads[place] if place < len(heads) else part.get("items", True)


def written_json(value: Any) -> str:
    """A value as grammars write it: no blanks, no exponents."""
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")
    if isinstance(value, list):
        return f"[{','.join(map(written_json, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{written_json(k)}:{written_json(v)}' for k, v in value.items())}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
