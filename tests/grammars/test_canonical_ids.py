"""Where a grammar forces a text, masks hold the ids that the model's tokenizer makes of it, at every place."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.random_inputs.grammar_draws import GrammarDraws
from tests.random_inputs.masked_answers import (
    ROOT,
    MaskedDraws,
    Spellings,
    open_large_tokenizer,
    schema_at,
    write_grammars,
)
from trencadis import LLM, SamplingParams, StructuredOutputsParams
from trencadis.core.token_masks.matcher_manager import ChoiceEnds, ChoiceMasks
from trencadis.core.token_masks.token_rule_matchers import AllowedIds, BadWords, bits
from trencadis.server.grammars.lark_grammar_and_tool_functions import WhitespaceRule
from trencadis.server.grammars.response_format import RequestedFormat

MODES = {"greedy": True, "sampled": False}


@pytest.fixture(scope="session")
def small(demo: GrammarDraws) -> MaskedDraws:
    return MaskedDraws(demo)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> MaskedDraws:
    return MaskedDraws(GrammarDraws(open_large_tokenizer(tmp_path_factory.mktemp("large"))))


@pytest.fixture(params=["demo", "20,000 entries"])
def masks(request: pytest.FixtureRequest) -> MaskedDraws:
    found: MaskedDraws = request.getfixturevalue("small" if request.param == "demo" else "large")
    return found


def schema_of(name: str, value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}


def write(masks: MaskedDraws, schema: Any) -> str:
    return masks.draws.written(RequestedFormat("json", schema, "schema", spaces=WhitespaceRule("")))


def check_forced(masks: MaskedDraws, grammar: str, text: str) -> None:
    """The masks of a text that is forced from its beginning hold the tokenizer's ids, one each, and then the end."""
    matcher, own = masks.grammars.matcher(grammar), masks.encode(text.encode())
    for token in own:
        assert masks.allowed(matcher) == [token]
        assert matcher.accept(token)
    assert masks.allowed(matcher) == masks.draws.vocabulary.eos


def test_each_place_of_a_forced_text_holds_the_tokenizers_id(masks: MaskedDraws) -> None:
    value = "an invoice_number, größer als 12"
    check_forced(masks, write(masks, schema_of("invoice_number", {"const": value})), f'{{"invoice_number":"{value}"}}')


def test_a_token_may_hold_the_end_of_forced_text_and_more(large: MaskedDraws) -> None:
    matcher = large.grammars.matcher(write(large, schema_of("name", {"type": ["string", "integer"]})))
    tokens = large.draws.vocabulary.tokens
    for token in large.encode(b'{"name'):
        assert large.allowed(matcher) == [token]
        matcher.accept(token)
    found = {tokens[i] for i in large.allowed(matcher)}
    assert b'":' in found and b'":"' in found, "either may be what the tokenizer writes"
    assert b'"' not in found, "no text begins with it here"


def test_words_with_one_beginning_are_written_as_each_of_them_is(masks: MaskedDraws) -> None:
    """A forced part of a word is written in other ids when the word goes on: ``Stor``, but ``S``, ``to``, ``red``."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "design").glob("*.md")))
    every = sorted(set(re.findall(r"[A-Za-z_]{4,}", text)))
    rng = random.Random(0)
    for _ in range(25):
        start = rng.randrange(len(every) - 8)
        words = [*rng.sample(every[start : start + 8], 4), *rng.choice([(), ("StoredRows", "StoringOps", "Storage")])]
        grammar = write(masks, schema_of("kind", {"enum": words}))
        for word in words:
            ids = masks.encode(f'{{"kind":"{word}"}}'.encode())
            assert masks.find_refused(grammar, ids) == -1, (word, words)


def check_corpus(masks: MaskedDraws, count: int, greedy: bool, most: float = 1.02) -> Spellings:
    """``most``: ids of forced text, as a share of the tokenizer's own."""
    found = masks.count(list(write_grammars(masks.draws, count)), greedy)
    assert not found.refused, found.refused[:3]
    assert found.answers > 0.5 * count and found.drawn <= most * found.own, str(found)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_of_the_corpus(masks: MaskedDraws, mode: str) -> None:
    """Too small for the bound of a thousand answers."""
    check_corpus(masks, 160, MODES[mode], 1.05)


def test_the_sample_would_show_one_token_a_byte(demo: GrammarDraws) -> None:
    found = MaskedDraws(demo, canonical=False).count(list(write_grammars(demo, 10)), False)
    assert found.refused and found.drawn > 1.1 * found.own


@pytest.mark.long
def test_a_thousand_answers(masks: MaskedDraws) -> None:
    print(f"\n{len(masks.draws.vocabulary.tokens)} ids")
    for mode, greedy in MODES.items():
        found = check_corpus(masks, 1400 if greedy else 1150, greedy)
        print(f"{mode}: {found}")
        assert found.answers >= 1000


def test_going_back_and_opening_anew_within_forced_text(masks: MaskedDraws) -> None:
    """Masks follow from the accepted ids alone."""
    rng = random.Random(1)
    for number, grammar in list(write_grammars(masks.draws, 12)):
        ids = masks.answer(masks.grammars.matcher(grammar), number, False, 60) or []
        matcher, want = masks.grammars.matcher(grammar), []
        for token in ids:
            want.append(masks.allowed(matcher))
            matcher.accept(token)
        for _ in range(4):
            place = rng.randrange(len(ids)) if ids else 0
            anew = masks.grammars.matcher(grammar)
            assert all(anew.accept(token) for token in ids[:place])
            branch = anew.fork()
            more = ids[place : place + rng.randrange(5)]
            assert all(anew.accept(token) for token in more)
            anew.rollback(len(more))
            for one in (anew, branch):
                for at in range(place, min(len(ids), place + 3)):
                    assert masks.allowed(one) == want[at]
                    one.accept(ids[at])


def test_control_tokens_within_forced_text(masks: MaskedDraws) -> None:
    writer = masks.draws.writer()
    start = writer.add_rule(writer.write_text('<tool_call>{"name": "get_weather"}</tool_call>well done'))
    matcher, control = masks.grammars.matcher(writer.write_grammar(start)), masks.draws.control
    own = [
        control["<tool_call>"], *masks.encode(b'{"name": "get_weather"}'), control["</tool_call>"],
        *masks.encode(b"well done"),
    ]  # fmt: skip
    for token in own:
        assert masks.allowed(matcher) == [token]
        assert matcher.accept(token)
    assert masks.allowed(matcher) == masks.draws.vocabulary.eos


@pytest.mark.parametrize(
    "value", ["cafe\u0301 \ufb01ne in the \u212b", "a <tool_call> <|im_end|> b", "an end   ", "日本語 so 🙂"]
)
def test_odd_text_is_written_as_it_stands(masks: MaskedDraws, value: str) -> None:
    """The tokenizer would compose characters; names of control tokens are text here."""
    matcher, ids = masks.grammars.matcher(write(masks, schema_of("x", {"const": value}))), list[int]()
    while (found := masks.allowed(matcher)) != masks.draws.vocabulary.eos:
        assert len(found) == 1 and found[0] not in masks.draws.vocabulary.special
        ids.append(found[0])
        assert matcher.accept(found[0])
    text = f'{{"x":"{value}"}}'
    assert masks.decode(ids) == text.encode()
    assert len(ids) < len(text.encode())
    if "<" not in value and "\u0301" not in value:
        assert ids == masks.encode(text.encode())


def choice(masks: MaskedDraws, grammar: str, *others: Any) -> ChoiceMasks:
    words = masks.draws.vocabulary
    ends = ChoiceEnds.of(len(words.tokens), words.eos)
    return ChoiceMasks(ends, (), masks.grammars.matcher(grammar), others)


def test_other_spellings_where_the_tokenizers_own_is_forbidden(small: MaskedDraws) -> None:
    grammar, size = write(small, schema_of("name", {"const": 1})), len(small.draws.vocabulary.tokens)
    own = small.encode(b'{"name":1}')
    word = next(i for i in own if small.draws.vocabulary.tokens[i] == b"name")
    single = AllowedIds(bits(size, small.draws.bytes.values()))
    for other in (BadWords.of(((word,),), size), single):
        one, out = choice(small, grammar, other), list[int]()
        while not one.ended and len(out) < 20:
            row = np.empty(-(-size // 8), np.uint8)
            one.fill(row)
            assert not one.failure
            out.append(int(np.flatnonzero(np.unpackbits(row, bitorder="little")[:size])[-1]))
            one.accept(out[-1])
            if small.decode(out) == b'{"name":1}':
                break
        assert small.decode(out) == b'{"name":1}' and word not in out


def test_a_long_forced_text_is_encoded_once(large: MaskedDraws) -> None:
    value = "the same words again and again, " * 1500
    grammar = write(large, schema_of("x", {"const": value}))
    start = time.thread_time()
    check_forced(large, grammar, f'{{"x":"{value}"}}')
    assert time.thread_time() - start < 2


class LibraryMatcher:
    """What ``GrammarMatcher`` was before it knew canonical ids."""

    def __init__(self, masks: MaskedDraws, grammar: str) -> None:
        self.matcher = masks.grammars.initial_matcher(grammar).deep_copy()
        self.scratch = np.zeros(-(-len(masks.draws.vocabulary.tokens) // 32) * 4, np.uint8)

    @property
    def error(self) -> str:
        return self.matcher.get_error()

    @contextmanager
    def contained(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            raise AssertionError("the library failed") from None

    def restrict(self, row: Any) -> None:
        with self.contained():
            self.matcher.unsafe_compute_mask_ptr(self.scratch.ctypes.data, len(self.scratch))
        count = min(len(row), len(self.scratch))
        row[:count] &= self.scratch[:count]
        row[count:] = 0

    def accept(self, token: int) -> bool:
        with self.contained():
            return self.matcher.consume_token(token)


class TimedMatcher:
    """A matcher, and the CPU seconds of each of its masks with the id that follows."""

    def __init__(self, matcher: Any, seconds: list[float]) -> None:
        self.matcher, self.seconds = matcher, seconds
        self.spent, self.ids = 0.0, list[int]()

    @property
    def error(self) -> str:
        return str(self.matcher.error)

    def restrict(self, row: Any) -> None:
        start = time.thread_time()
        self.matcher.restrict(row)
        self.spent = time.thread_time() - start

    def accept(self, token: int) -> bool:
        start = time.thread_time()
        found = bool(self.matcher.accept(token))
        self.seconds.append(self.spent + time.thread_time() - start)
        self.ids.append(token)
        return found


@pytest.mark.long
def test_masks_cost_at_most_a_fifth_more(masks: MaskedDraws) -> None:
    """Against masks of one token a byte, as they were before, in turns.

    A forced text has fewer masks now, so that more of all are of free text, which cost more: quantiles are only shown.
    """
    bytewise = MaskedDraws(masks.draws, canonical=False)
    spent: dict[str, list[float]] = {"before": [], "now": []}
    written = dict.fromkeys(spent, 0)
    for turn in range(6):
        for number, grammar in write_grammars(masks.draws, 120):
            made = {"before": LibraryMatcher(bytewise, grammar), "now": masks.grammars.matcher(grammar)}
            for name in made if (turn + number) % 2 else reversed(made):
                timed = TimedMatcher(made[name], spent[name])
                masks.answer(timed, 1000 * turn + number, bool(turn % 2), 200)
                written[name] += len(masks.decode(timed.ids))
    figures = {}
    for name, seconds in spent.items():
        us = np.array(seconds) * 1e6
        p50, p90, p99 = np.percentile(us, (50, 90, 99)).tolist()
        figures[name] = {"mean": us.mean(), "p50": p50, "p90": p90, "p99": p99, "byte": us.sum() / written[name]}
        print(f"\n{name}, {len(us)} masks, us:", {key: round(float(one), 2) for key, one in figures[name].items()})
    ratios = {key: float(figures["now"][key] / figures["before"][key]) for key in figures["now"]}
    print("now / before:", {key: round(ratio, 3) for key, ratio in ratios.items()})
    assert max(ratios["mean"], ratios["p50"], ratios["byte"]) <= 1.2


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_the_demo_model_writes_canonical_ids(small: MaskedDraws, mode: str) -> None:
    """Through the engine; those that end within 200 ids."""
    grammars = list(write_grammars(small.draws, 600))
    params = [
        SamplingParams(
            temperature=0 if MODES[mode] else 1, seed=number, max_tokens=200,
            structured_outputs=StructuredOutputsParams(json=schema_at(number), disable_any_whitespace=number % 2 == 1),
        )
        for number, _ in grammars
    ]  # fmt: skip
    demo, memory = str(ROOT / "assets" / "demo"), 64 << 20
    with LLM(demo, dtype="float32", max_model_len=512, kv_cache_memory_bytes=memory, max_num_seqs=32) as llm:
        answers = llm.generate(["Fill the form:"] * len(params), params, use_tqdm=False)
    found = Spellings()
    for (_, grammar), answer in zip(grammars, answers, strict=True):
        if answer.outputs[0].finish_reason == "stop":
            ids = [i for i in answer.outputs[0].token_ids if i not in small.draws.vocabulary.special]
            small.compare(grammar, ids, found)
    print(f"\n{mode}: {found}")
    assert found.answers >= 300 and not found.refused and found.drawn <= 1.02 * found.own
