"""Masks of forced text under small tokenizers, against every text of a grammar: each has its own ids in the masks."""

from __future__ import annotations

import json
import random
import zlib
from itertools import product
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from trencadis.core.token_masks.grammar_matcher import CompiledGrammars, GrammarMatcher
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import CanonicalTokenizer, Vocabulary
from trencadis.server.grammars.grammar_cache import make_vocabulary
from trencadis.server.text import checkpoint_tokenizer as text_tokenizer


def random_merges(rng: random.Random, count: int = 14) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens over three letters, and merges in any order: those that make long tokens may come first."""
    tokens, merges = list("abc"), list[tuple[str, str]]()
    while len(merges) < count:
        left, right = rng.choice(tokens), rng.choice(tokens)
        if left + right not in tokens and len(left + right) <= 5:
            tokens.append(left + right)
            merges.append((left, right))
    if rng.random() < 0.5:
        rng.shuffle(merges)
    return tokens, merges


def random_texts(rng: random.Random) -> tuple[str, list[str]]:
    """A regex with a forced part, and all texts that it matches."""
    forced = "".join(rng.choices("abc", k=rng.randrange(1, 9)))

    def every(letters: str, least: int, most: int) -> list[str]:
        return ["".join(one) for count in range(least, most + 1) for one in product(letters, repeat=count)]

    match rng.randrange(4):
        case 0:
            return f"{forced}[abc]{{0,4}}", [forced + end for end in every("abc", 0, 4)]
        case 1:
            ends = ["".join(rng.choices("abc", k=rng.randrange(1, 7))) for _ in range(6)]
            return f"{forced}({'|'.join(ends)})", [forced + end for end in ends]
        case 2:
            return f"{forced}[ab]{{1,4}}", [forced + end for end in every("ab", 1, 4)]
        case _:
            texts = [f"{first}c{forced}{end}" for first in every("ab", 0, 2) for end in every("bc", 0, 3)]
            return f"[ab]{{0,2}}c{forced}[bc]{{0,3}}", texts


def open_grammars(tokens: list[bytes], tokenizer: Tokenizer) -> CompiledGrammars:
    """A rank's grammars over a vocabulary to which an end is added."""
    made = CompiledGrammars()
    packed = zlib.compress(tokenizer.to_str().encode())
    made.set_vocabulary(Vocabulary([*tokens, b"<end>"], [len(tokens)], [len(tokens)], packed).pack())
    return made


def allowed(matcher: GrammarMatcher, size: int) -> set[int]:
    row = np.full(-(-size // 8), 255, np.uint8)
    matcher.restrict(row)
    assert not matcher.error
    return set(np.flatnonzero(np.unpackbits(row, bitorder="little")[:size]).tolist())


def compare(seed: int) -> int:
    """Counts the texts of one grammar whose canonical ids all masks held; fails at the first that they did not."""
    rng = random.Random(seed)
    tokens, merges = random_merges(rng)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    grammars = open_grammars([token.encode() for token in tokens], tokenizer)
    pattern, texts = random_texts(rng)
    begun = grammars.matcher(llguidance.LLMatcher.grammar_from_regex(pattern))
    for text in texts:
        matcher, ids = begun.fork(), tokenizer.encode(text).ids
        for place, token in enumerate(ids):
            assert token in allowed(matcher, len(tokens) + 1), (pattern, [tokens[i] for i in ids], place)
            assert matcher.accept(token)
        assert matcher.accepting
    return len(texts)


def test_each_text_of_a_grammar_may_be_written_in_its_own_ids() -> None:
    assert sum(map(compare, range(40))) > 1000


@pytest.mark.long
def test_each_text_of_two_thousand_grammars() -> None:
    print(f"\n{sum(map(compare, range(1000, 3000)))} texts")


def test_forced_text_without_a_choice_is_one_run() -> None:
    """``ab`` merges first: the tokenizer never writes ``a``, ``bc``, so no mask holds ``a`` where ``abc`` is forced."""
    tokens = ["a", "b", "c", "bc", "ab", "abc"]
    made = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("a", "b"), ("b", "c")])
    grammars = open_grammars([token.encode() for token in tokens], Tokenizer(made))
    matcher = grammars.matcher(llguidance.LLMatcher.grammar_from_regex("abc(b|a)"))
    for token in (4, 2):
        assert allowed(matcher, 7) == {token}
        assert matcher.accept(token)
    assert allowed(matcher, 7) == {0, 1}


def byte_tokens(start: int) -> dict[str, int]:
    return {f"<0x{byte:02X}>": start + byte for byte in range(256)}


WORDS = ["▁", "a", "b", "c", '"', ":", "ab", "▁ab", '":', '":"', '{"']


def open_sentencepiece(metaspace: bool) -> text_tokenizer.Tokenizer:
    """A tokenizer that puts a blank before a text and has a token for each byte, as SentencePiece's do."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **byte_tokens(3)}
    vocab |= {word: len(vocab) + i for i, word in enumerate([*WORDS, "{", "}"])}
    merges = [("a", "b"), ("▁", "ab"), ('"', ":"), ('":', '"'), ("{", '"')]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spec = json.loads(made.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": i, "content": text, **flags} for text, i in list(vocab.items())[:3]]
    return text_tokenizer.Tokenizer(spec, {"eos_token": "</s>"})


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_blank_before_a_text_is_no_part_of_forced_text(metaspace: bool) -> None:
    opened = open_sentencepiece(metaspace)
    words = make_vocabulary(opened, opened.vocab_size, [2])
    grammars = CompiledGrammars()
    grammars.set_vocabulary(words.pack())
    schema = {"type": "object", "properties": {"ab": {"const": "a ab é"}}, "required": ["ab"]}
    options: Any = {"whitespace_flexible": False}
    grammar = llguidance.LLMatcher.grammar_from_json_schema({**schema, "additionalProperties": False}, options)
    matcher, written = grammars.matcher(grammar), list[bytes]()
    while (found := allowed(matcher, len(words.tokens))) != {2}:
        (token,) = found
        assert matcher.accept(token)
        written.append(words.tokens[token] if token > 258 else b"<%d>" % (token - 3))
    accent = [b"<195>", b"<169>"]
    assert written == [b'{"', b"ab", b'":"', b"a", b" ab", b" ", *accent, b'"', b"}"]


def test_a_byte_token_is_no_second_spelling_of_a_character() -> None:
    """Ids of the same bytes: the tokenizer writes one of them where it has a choice of texts, too."""
    opened = open_sentencepiece(True)
    words = make_vocabulary(opened, opened.vocab_size, [2])
    grammars = CompiledGrammars()
    grammars.set_vocabulary(words.pack())
    matcher = grammars.matcher(llguidance.LLMatcher.grammar_from_regex('":("a|c)'))
    assert {words.tokens[i] for i in allowed(matcher, len(words.tokens))} == {b'":', b'":"'}
    assert all(i > 258 for i in allowed(matcher, len(words.tokens)))


def test_ids_spell_exactly_the_text() -> None:
    """Whatever a tokenizer makes of a text: an unknown character, another case, a control token's name."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<c>": 3, "?": 4, "A": 5, "<": 6, "c": 7, ">": 8}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="?"))
    made.normalizer = normalizers.Lowercase()
    made.add_special_tokens(["<c>"])
    words = [text.encode() for text in vocab]
    tokenizer = CanonicalTokenizer(words, [3], [3], zlib.compress(made.to_str().encode()))
    for text in (b"ab", b"abA", b"ab<c>ab", b"Aab", b"abZab", b"ab\xc3"):
        ids = tokenizer.encode(text)
        spelt = b"".join(words[i] for i in ids)
        assert spelt == bytes(byte for byte in text if byte in tokenizer.byte_ids), text
        assert 3 not in ids
    assert tokenizer.encode(b"ab<c>ab") == (2, 6, 7, 8, 2)
