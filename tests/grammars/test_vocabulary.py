"""The vocabulary of grammars: bytes of words, control tokens apart, nothing for ids that the tokenizer lacks."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import llguidance
import psutil
import pytest

from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.random_inputs.grammar_draws import GrammarDraws
from trencadis.core.token_masks.grammar_matcher import CompiledGrammars
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import open_tokenizer
from trencadis.core.token_masks.grammar_trial import VocabularySkeleton
from trencadis.server.grammars.grammar_cache import find_control_tokens, make_skeleton, make_vocabulary
from trencadis.server.text.checkpoint_tokenizer import Tokenizer


def test_words_are_bytes_and_control_tokens_are_apart(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(write_text_checkpoint(tmp_path, ["<|mark|>"], ["    ", "word"]))
    made = make_vocabulary(tokenizer, tokenizer.vocab_size + 50, [tokenizer.eos or 0])
    assert len(made.tokens) == tokenizer.vocab_size + 50 and not any(made.tokens[-50:])
    for text in ("<|mark|>", "<tool_call>", "</think>", "<|im_end|>"):
        assert tokenizer.added[text] in made.special and made.tokens[tokenizer.added[text]] == text.encode()
    for text in ("    ", "word"):
        assert tokenizer.added[text] not in made.special
    assert {bytes([b]) for b in range(256)} <= set(made.tokens)


def test_a_sentencepiece_vocabulary_has_bytes_and_blanks() -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3, "b": 4, **{f"<0x{i:02X}>": 5 + i for i in range(256)}}
    added = [{"id": i, "content": t, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for t, i in words.items() if i < 3]  # fmt: skip
    tokenizer = Tokenizer(
        {
            "version": "1.0",
            "added_tokens": added,
            "model": {"type": "BPE", "vocab": words, "merges": [], "byte_fallback": True, "unk_token": "<unk>"},
            "decoder": {"type": "ByteFallback"},
        },
        {"eos_token": "</s>"},
    )
    made = make_vocabulary(tokenizer, len(words), [2])
    assert made.tokens[3:5] == [b" a", b"b"] and made.tokens[5:261] == [bytes([i]) for i in range(256)]
    assert made.special == [0, 1, 2] and find_control_tokens(tokenizer) == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_a_trial_knows_the_same_control_tokens(demo: GrammarDraws) -> None:
    made = make_skeleton(demo.tokenizer, demo.tokenizer.vocab_size + 8, [demo.tokenizer.eos or 0])
    whole = VocabularySkeleton.unpack(made.pack()).make_vocabulary()
    assert whole.special == demo.vocabulary.special and whole.eos == demo.vocabulary.eos
    assert {bytes([b]) for b in range(256)} <= set(whole.tokens)
    assert open_tokenizer(whole).is_special_token(demo.control["<tool_call>"])


def grow(spec: dict[str, Any], size: int) -> None:
    """Gives a tokenizer.json ``size`` entries, by merges at random."""
    rng, vocab, merges = random.Random(0), spec["model"]["vocab"], spec["model"]["merges"]
    spec["added_tokens"] = [one for one in spec["added_tokens"] if one["content"] in vocab]
    pieces = list(vocab)
    while len(vocab) < size:
        left, right = rng.choice(pieces), rng.choice(pieces[:400])
        if left + right not in vocab and len(left + right) <= 12:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
            pieces.append(left + right)


@pytest.mark.long
def test_what_a_large_vocabulary_costs(tmp_path: Path) -> None:
    """A vocabulary of 151,936 ids with its tokenizer, in a process that has the libraries already."""
    spec = json.loads((write_text_checkpoint(tmp_path) / "tokenizer.json").read_text())
    grow(spec, 151_935)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"].append({"id": 151_935, "content": "<|im_end|>", **flags})
    tokenizer = Tokenizer(spec, {"eos_token": "<|im_end|>"})
    small = make_vocabulary(Tokenizer.from_checkpoint(tmp_path), 700, [699])
    open_tokenizer(small)
    large = make_vocabulary(tokenizer, 151_936, [151_935])
    process = psutil.Process()
    before, start = process.memory_info().rss, time.perf_counter()
    packed = large.pack()
    grammars = CompiledGrammars()
    grammars.set_vocabulary(packed)
    matcher = grammars.matcher(llguidance.LLMatcher.grammar_from_regex("[a-z]+"))
    took, grown = time.perf_counter() - start, (process.memory_info().rss - before) / 1e6
    print(f"\n151,936 ids: {len(packed) / 1e6:.1f} MB packed, opened in {took:.1f} s, {grown:.0f} MB more")
    assert not matcher.error and took < 20 and grown < 300
