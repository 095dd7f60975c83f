"""The grammar cache: tried once, remembered, shared by requests that want the same at once."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.scripted_app import trials
from tests.random_inputs.grammar_draws import GrammarDraws
from trencadis.core.errors import BadRequest
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import Vocabulary
from trencadis.core.token_masks.grammar_trial import SHOWN, shorten_message
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.grammars.response_format import RequestedFormat, find_requested_format
from trencadis.server.prompts.answer_grammar import AnswerOutline
from trencadis.server.prompts.answer_reader import AnswerParsers


@pytest.fixture
def grammar_cache(demo: GrammarDraws) -> Iterator[GrammarCache]:
    tokenizer = demo.tokenizer
    yield GrammarCache(tokenizer, tokenizer.vocab_size, [tokenizer.eos or 0], trials())


def outline(schema: Any) -> AnswerOutline:
    return AnswerOutline(AnswerParsers(), RequestedFormat("json", schema, "schema"), None, None)


def counted(grammar_cache: GrammarCache, one: AnswerOutline) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def write() -> str:
        calls.append(1)
        return one.write(grammar_cache.make_writer())

    return write, calls


def test_a_grammar_is_made_once_also_for_requests_at_once(grammar_cache: GrammarCache) -> None:
    one = outline({"type": "integer"})
    write, calls = counted(grammar_cache, one)

    async def whole() -> set[str]:
        made = await asyncio.gather(*(grammar_cache.get_grammar(one.make_key(), write, "schema") for _ in range(5)))
        return {*made, await grammar_cache.get_grammar(one.make_key(), write, "schema")}

    assert len(asyncio.run(whole())) == 1 and len(calls) == 1


def test_a_caller_who_leaves_does_not_end_it_for_others(grammar_cache: GrammarCache) -> None:
    one = outline({"type": "string", "maxLength": 3})
    write, _ = counted(grammar_cache, one)

    async def whole() -> str:
        first = asyncio.create_task(grammar_cache.get_grammar(one.make_key(), write, "schema"))
        await asyncio.sleep(0)
        second = asyncio.create_task(grammar_cache.get_grammar(one.make_key(), write, "schema"))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert "maxLength" in asyncio.run(whole())


def test_a_bad_grammar_is_tried_again_and_says_why(grammar_cache: GrammarCache) -> None:
    one = outline({"type": "object", "required": ["a"], "additionalProperties": False})
    write, calls = counted(grammar_cache, one)
    for _ in range(2):
        with pytest.raises(BadRequest, match="schema makes no grammar: Unsatisfiable schema") as caught:
            asyncio.run(grammar_cache.get_grammar(one.make_key(), write, "schema"))
        assert caught.value.param == "schema"
    assert len(calls) == 2


def test_words_of_the_library_are_one_short_line() -> None:
    reported = shorten_message("at 1(8): bad\n   1 | start: /x/\n     ^\n" + "y" * 300 + "<state>{secret}")
    assert (
        reported.startswith("at 1(8): bad 1 | start: /x/ yyy") and len(reported) == SHOWN and "secret" not in reported
    )


def test_the_vocabulary_is_packed_for_the_engine(grammar_cache: GrammarCache, demo: GrammarDraws) -> None:
    assert Vocabulary.unpack(asyncio.run(grammar_cache.pack_vocabulary())) == demo.vocabulary


def test_options_of_blanks_may_stand_beside_a_format() -> None:
    form = {"type": "json_object"}
    found = find_requested_format(form, {"disable_any_whitespace": True}, {})
    assert found is not None and found.kind == "json_object" and not found.spaces.pattern
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    found = find_requested_format({**form, "schema": schema}, None, {})
    assert found is not None and (found.kind, found.value, found.where) == ("json", schema, "response_format.schema")
    found = find_requested_format({**form, "schema": {}}, None, {})
    assert found is not None and found.kind == "json_object", "an object, whatever it holds"
    assert (
        find_requested_format({"type": "text"}, {}, {}) is None
        and find_requested_format(None, {"json_object": False}, {}) is None
    )


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
def test_what_a_schema_costs_before_the_first_token(grammar_cache: GrammarCache, demo: GrammarDraws) -> None:
    """A new schema: read, tried in a warm worker, compiled by a rank. A known one: found."""
    new: list[float] = []
    known: list[float] = []
    ranks: list[float] = []

    async def whole() -> None:
        await grammar_cache.get_grammar(
            b"warm", lambda: outline({"type": "null"}).write(grammar_cache.make_writer()), "schema"
        )
        for number in range(40):
            schema = schema_of_5_kb(number)
            for seconds in (new, known):
                start = time.perf_counter()
                one = outline(schema)
                made = await grammar_cache.get_grammar(
                    one.make_key(),
                    lambda one=one: one.write(grammar_cache.make_writer()),  # type: ignore[misc]
                    "schema",
                )
                seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            demo.matcher(made).compute_bitmask()
            ranks.append(time.perf_counter() - start)

    asyncio.run(whole())
    size = len(json.dumps(schema_of_5_kb(0)))
    reported = [
        f"{name} {1000 * statistics.median(some):.2f} ms (least {1000 * min(some):.2f})"
        for name, some in (("new", new), ("known", known), ("compiled by a rank", ranks))
    ]
    print(f"\n{size} bytes: {', '.join(reported)}")
    # The bars are 20 and 2 ms on a machine that does nothing else.
    assert min(new) < 0.1 and min(known) < 0.01
