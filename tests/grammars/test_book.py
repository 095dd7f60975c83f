"""The book of grammars: tried once, remembered, shared by requests that want the same at once."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.drawn.grammar_draws import GrammarDraws
from tests.fakes.scripted_app import trials
from trencadis.core.errors import BadRequest
from trencadis.core.masks.trial import SHOWN, shown
from trencadis.core.masks.vocabulary import Vocabulary
from trencadis.server.grammars.asked import AskedForm, asked_form
from trencadis.server.grammars.book import GrammarBook
from trencadis.server.prompts.answer_forms import AnswerForms
from trencadis.server.prompts.constraints import Outline


@pytest.fixture
def book(demo: GrammarDraws) -> Iterator[GrammarBook]:
    tokenizer = demo.tokenizer
    yield GrammarBook(tokenizer, tokenizer.vocab_size, [tokenizer.eos or 0], trials())


def outline(schema: Any) -> Outline:
    return Outline(AnswerForms(), AskedForm("json", schema, "schema"), None, None)


def counted(book: GrammarBook, one: Outline) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def write() -> str:
        calls.append(1)
        return one.write(book.writer())

    return write, calls


def test_a_grammar_is_made_once_also_for_requests_at_once(book: GrammarBook) -> None:
    one = outline({"type": "integer"})
    write, calls = counted(book, one)

    async def whole() -> set[str]:
        made = await asyncio.gather(*(book.grammar(one.key(), write, "schema") for _ in range(5)))
        return {*made, await book.grammar(one.key(), write, "schema")}

    assert len(asyncio.run(whole())) == 1 and len(calls) == 1


def test_a_caller_who_leaves_does_not_end_it_for_others(book: GrammarBook) -> None:
    one = outline({"type": "string", "maxLength": 3})
    write, _ = counted(book, one)

    async def whole() -> str:
        first = asyncio.create_task(book.grammar(one.key(), write, "schema"))
        await asyncio.sleep(0)
        second = asyncio.create_task(book.grammar(one.key(), write, "schema"))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert "maxLength" in asyncio.run(whole())


def test_a_bad_grammar_is_tried_again_and_says_why(book: GrammarBook) -> None:
    one = outline({"type": "object", "required": ["a"], "additionalProperties": False})
    write, calls = counted(book, one)
    for _ in range(2):
        with pytest.raises(BadRequest, match="schema makes no grammar: Unsatisfiable schema") as caught:
            asyncio.run(book.grammar(one.key(), write, "schema"))
        assert caught.value.param == "schema"
    assert len(calls) == 2


def test_words_of_the_library_are_one_short_line() -> None:
    told = shown("at 1(8): bad\n   1 | start: /x/\n     ^\n" + "y" * 300 + "<state>{secret}")
    assert told.startswith("at 1(8): bad 1 | start: /x/ yyy") and len(told) == SHOWN and "secret" not in told


def test_the_vocabulary_is_packed_for_the_engine(book: GrammarBook, demo: GrammarDraws) -> None:
    assert Vocabulary.unpacked(asyncio.run(book.vocabulary())) == demo.vocabulary


def test_options_of_blanks_may_stand_beside_a_format() -> None:
    form = {"type": "json_object"}
    found = asked_form(form, {"disable_any_whitespace": True}, {})
    assert found is not None and found.kind == "json_object" and not found.spaces.pattern
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    found = asked_form({**form, "schema": schema}, None, {})
    assert found is not None and (found.kind, found.value, found.where) == ("json", schema, "response_format.schema")
    found = asked_form({**form, "schema": {}}, None, {})
    assert found is not None and found.kind == "json_object", "an object, whatever it holds"
    assert asked_form({"type": "text"}, {}, {}) is None and asked_form(None, {"json_object": False}, {}) is None


def schema_of_5_kb(number: int) -> dict[str, Any]:
    held = {
        f"field_{number}_{i}": {
            "type": "object",
            "description": "What the field holds, in a sentence of usual length.",
            "properties": {"name": {"type": "string", "maxLength": 40}, "kind": {"enum": ["a", "b", "c"]}},
            "required": ["name"],
            "additionalProperties": False,
        }
        for i in range(20)
    }
    return {"type": "object", "properties": held, "required": list(held), "additionalProperties": False}


@pytest.mark.long
def test_what_a_schema_costs_before_the_first_token(book: GrammarBook, demo: GrammarDraws) -> None:
    """A new schema: read, tried in a warm worker, compiled by a rank. A known one: found."""
    new: list[float] = []
    known: list[float] = []
    ranks: list[float] = []

    async def whole() -> None:
        await book.grammar(b"warm", lambda: outline({"type": "null"}).write(book.writer()), "schema")
        for number in range(40):
            schema = schema_of_5_kb(number)
            for seconds in (new, known):
                start = time.perf_counter()
                one = outline(schema)
                made = await book.grammar(one.key(), lambda one=one: one.write(book.writer()), "schema")  # type: ignore[misc]
                seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            demo.matcher(made).compute_bitmask()
            ranks.append(time.perf_counter() - start)

    asyncio.run(whole())
    size = len(json.dumps(schema_of_5_kb(0)))
    told = [
        f"{name} {1000 * statistics.median(some):.2f} ms (least {1000 * min(some):.2f})"
        for name, some in (("new", new), ("known", known), ("compiled by a rank", ranks))
    ]
    print(f"\n{size} bytes: {', '.join(told)}")
    # The bars are 20 and 2 ms on a machine that does nothing else.
    assert min(new) < 0.1 and min(known) < 0.01
