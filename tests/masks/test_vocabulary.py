"""A vocabulary crosses to a rank and gives masks there."""

from __future__ import annotations

import llguidance
import numpy as np

from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary, open_tokenizer

TOKENS = [bytes([i]) for i in range(256)] + [b'{"', b"</think>", b"", b'{"a', b"<eos>"]
THINK, NONE, EOS = 257, 258, 260


def allowed(matcher: llguidance.LLMatcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())


def matcher(grammar: str) -> llguidance.LLMatcher:
    made = Vocabulary(TOKENS, [THINK, EOS], [EOS])
    return llguidance.LLMatcher(open_tokenizer(Vocabulary.unpack(made.pack())), grammar)


def test_a_schema_may_begin_with_every_token_that_fits() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    found = matcher(llguidance.LLMatcher.grammar_from_json_schema(schema))
    assert allowed(found) - {ord(" "), ord("\n"), ord("\t"), ord("\r")} == {ord("{"), 256, 259}


def test_no_text_matches_a_control_token_nor_an_id_without_bytes() -> None:
    anything = allowed(matcher(llguidance.LLMatcher.grammar_from_regex("(?s:.*)")))
    assert ord("<") in anything and EOS in anything and not {THINK, NONE} & anything


def test_a_grammar_names_control_tokens() -> None:
    found = matcher(llguidance.LLMatcher.grammar_from_lark("start: </think>"))
    assert allowed(found) == {THINK} and found.consume_token(THINK) and allowed(found) == {EOS}
