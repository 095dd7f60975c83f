"""Choices that their own constraints end are errors of the client, and slow grammars end before others wait long."""

from __future__ import annotations

import random
import time

import llguidance
import numpy as np
import pytest

from tests.masks.test_late_masks import GRAMMARS
from tests.oracles.shadow_engine import shadow_engine
from tests.oracles.shadow_model import ShadowHead
from tests.traffic.rule_oracle import EOS, TOKENS, VOCABULARY
from trencadis.core.output_constraints import LIBRARY_FAILED, Rule
from trencadis.core.request import Delta, Request, SamplingParams
from trencadis.core.step import Opening
from trencadis.core.step_output import HeadOutput
from trencadis.core.token_masks import matcher_manager
from trencadis.core.token_masks.draft_masks import ChoiceRows
from trencadis.core.token_masks.grammar_matcher import GrammarMatcher
from trencadis.core.token_masks.matcher_manager import NOTHING_LEFT, TOO_SLOW, MatcherManager

LARK = llguidance.LLMatcher.grammar_from_lark
VOCAB = len(TOKENS)
CONTRADICTIONS = {
    "a grammar and allowed ids": (Rule(grammar=GRAMMARS[3], allowed=(30,)), NOTHING_LEFT),
    "a grammar and bad words": (Rule(grammar=GRAMMARS[3], words=((1,), (2,), (53,))), NOTHING_LEFT),
    "allowed ids and bad words": (Rule(allowed=(5,), words=((5,),)), NOTHING_LEFT),
    "a contradiction after some tokens": (
        Rule(grammar=llguidance.LLMatcher.grammar_from_regex("[a-c][a-c][xy]z"), words=((24,), (25,))), NOTHING_LEFT,
    ),
    "a grammar that takes too long": (Rule(grammar=LARK("start: (/[a-z ]/{1,999}){1,999}")), TOO_SLOW),
    "a regex that needs too many states": (
        Rule(grammar=LARK("start: T\nT: " + " & ".join(f"/(?s:.*){c}.{{15}}b(?s:.*)/" for c in "acdefghijk"))), "lexer",
    ),
}  # fmt: skip
SLOW = {
    "repetitions of repetitions": 'start: (("a"{1,9999}){1,9999}){1,9999}',
    "repetitions of letters": "start: (/[a-z ]/{1,99}){1,99}",
    "an ambiguous sum": 'start: e\ne: e e | "a" | "b" | e "c" e |',
    "palindromes": 'start: s\ns: /./ s /./ | /./ s | s /./ | "x"',
    "nine hundred ways to write a letter": "start: s*\ns: "
    + " | ".join(f"r{i}" for i in range(900))
    + "".join(f"\nr{i}: /[a-z ]/" for i in range(900)),
}


def answer(rule: Rule, tokens: int = 200) -> Delta:
    """The last Delta of a request under ``rule``."""
    engine, _ = shadow_engine(blocks=40, size=8, rows=8, depth=1, length=256)
    engine.set_vocabulary(VOCABULARY.pack())
    engine.add(Request("a", [1, 2], SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=3), rule=rule))
    for _ in range(20 * tokens):
        for delta in engine.step():
            if delta.finish:
                return delta
    raise AssertionError("no end")


def sample(manager: MatcherManager, rng: random.Random) -> str:
    """Samples a token that the mask of choice 1 allows, as a step does; returns why the choice failed, or empty."""
    row = np.empty(-(-VOCAB // 8), np.uint8)
    manager.fill(1, row, ())
    allowed = np.unpackbits(row, bitorder="little").nonzero()[0].tolist()
    token = rng.choice([i for i in allowed if i != EOS] or allowed)
    head = HeadOutput(np.array([token], np.int32))
    pending = manager.track_sample(ShadowHead(head), {1: ChoiceRows(0)})
    pending.result()
    return pending.failures.get(1, "")


def open_manager(rule: Rule) -> MatcherManager:
    made = MatcherManager(VOCAB, (EOS,))
    made.grammars.set_vocabulary(VOCABULARY.pack())
    made.apply((), [Opening(1, rule, (), ())])
    return made


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_a_request_forbids_itself_is_its_own_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, reason = CONTRADICTIONS[name]
    if reason == TOO_SLOW:
        monkeypatch.setattr(matcher_manager, "SECONDS", 0.02)
    delta = answer(rule)
    assert (delta.finish, delta.status) == ("error", 400) and reason in delta.message


def test_a_library_that_fails_is_a_fault_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GrammarMatcher, row: object) -> None:
        self._break(ValueError("index out of bounds"))

    monkeypatch.setattr(GrammarMatcher, "restrict", fail)
    delta = answer(Rule(grammar=GRAMMARS[0]))
    assert (delta.finish, delta.status) == ("error", 500) and delta.message.startswith(LIBRARY_FAILED)


def sample_slowly(name: str) -> None:
    """Samples up to 300 tokens; the choice ends soon after its CPU seconds are used up, and no mask takes long."""
    manager, rng, longest = open_manager(Rule(grammar=LARK(SLOW[name]))), random.Random(1), 0.0
    manager.grammars.initial_matcher(LARK(SLOW[name]))
    start = before = time.thread_time()
    count = 0
    for count in range(300):  # noqa: B007
        failure = sample(manager, rng)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
        if failure:
            break
    allowed = matcher_manager.SECONDS + 1.2 * matcher_manager.SECONDS_A_TOKEN * count
    assert before - start < allowed + 0.5 and longest < 0.5, (before - start, longest, count, failure)


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_grammar_ends_soon(name: str) -> None:
    sample_slowly(name)


@pytest.mark.parametrize("name", ["repetitions of letters", "an ambiguous sum", "repetitions of repetitions"])
def test_a_slow_grammar_ends_sooner_with_less_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_manager, "SECONDS", 0.02)
    monkeypatch.setattr(matcher_manager, "SECONDS_A_TOKEN", 0.0005)
    sample_slowly(name)


@pytest.mark.parametrize("rule", [Rule(grammar=GRAMMARS[0]), Rule(allowed=(5, 6)), Rule(words=((5,), (6, 7)))])
def test_ranks_report_slow_masks_and_go_on_with_the_same(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long masks take differs between ranks, so it must not change them."""
    quick, slow = open_manager(rule), open_manager(rule)
    rows = np.empty((2, -(-VOCAB // 8)), np.uint8)
    for seed in range(4):
        for manager, row in zip((quick, slow), rows, strict=True):
            monkeypatch.setattr(matcher_manager, "SECONDS", -10.0 if manager is slow else 10.0)
            manager.fill(1, row, ())
            failure = sample(manager, random.Random(seed))
            assert failure == (TOO_SLOW if manager is slow else "")
        assert (rows[0] == rows[1]).all()


def test_an_answer_that_ends_is_never_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_manager, "SECONDS", -10.0)
    manager = open_manager(Rule(allowed=(5,)))
    assert sample(manager, random.Random(0)) == TOO_SLOW
    manager.apply((1,), [Opening(1, Rule(allowed=(EOS,)), (), ())])
    assert sample(manager, random.Random(0)) == ""
