"""Schemas, regexes, grammars and tools that are made to cost much: none costs the server more than 2 s or 64 MB.

A trial that runs out of its limits costs a worker process, which is replaced.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trencadis.core.errors import BadRequest
from trencadis.server.grammars.grammar_cache import GrammarCache
from trencadis.server.grammars.response_format import RequestedFormat, find_requested_format
from trencadis.server.prompts.answer_grammar import AnswerOutline, RequestedCalls
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.tools.json_tool_parsers import HermesToolParser
from trencadis.server.tools.qwen3_tool_parser import Qwen3ToolParser

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
SECONDS, BYTES = 2.0, 64 << 20
"""The bars; a test waits five times as long."""


def chain(count: int, link: Callable[[str], Any]) -> Any:
    return {
        "$defs": {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)} | {f"d{count}": {}},
        "$ref": "#/$defs/d0",
    }


def nested(depth: int, wrap: str) -> Any:
    made: Any = {"type": "integer"}
    for _ in range(depth):
        made = {wrap: made} if wrap in ("items", "additionalProperties") else {wrap: [made, {"type": "string"}]}
    return made


def product(parts: int, options: int, width: int) -> Any:
    def option(i: int, j: int) -> Any:
        return {"properties": {f"p{i}_{j}_{k}": {"type": "string"} for k in range(width)}}

    return {"allOf": [{"anyOf": [option(i, j) for j in range(options)]} for i in range(parts)]}


def doubling(count: int, separator: str, upper: bool) -> str:
    r = "R" if upper else "r"
    rules = "\n".join(f"{r}{i}{separator}{r}{i + 1} {r}{i + 1}" for i in range(count))
    return f'{rules}\n{r}{count}{separator}"a"\n'


def tagged(i: int) -> Any:
    return {"type": "object", "required": ["k"], "properties": {"k": {"const": i}}}


def links(count: int, rule: str, last: str) -> str:
    return "\n".join([*(rule.format(i, i + 1) for i in range(count)), last.format(count)])


def tools(count: int, width: int) -> list[Any]:
    wide = {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for i in range(width)}
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": wide}}} for i in range(count)
    ]


ATTACKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a chain of references": ("json", lambda: chain(3000, lambda ref: {"items": {"$ref": ref}})),
    "a chain of bare references": ("json", lambda: chain(5000, lambda ref: {"$ref": ref})),
    "a chain of alternatives": (
        "json", lambda: chain(90, lambda ref: {"anyOf": [{"$ref": ref}, {"items": {"$ref": ref}}]})
    ),
    "two ways at every reference": ("json", lambda: chain(90, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]})),
    "deep oneOf": ("json", lambda: nested(60, "oneOf")),
    "deep anyOf": ("json", lambda: nested(60, "anyOf")),
    "deep items": ("json", lambda: nested(60, "items")),
    "wide oneOf": ("json", lambda: {"oneOf": [{"properties": {f"a{i}": {}}} for i in range(2000)]}),
    "wide oneOf with tags": ("json", lambda: {"oneOf": [tagged(i) for i in range(3000)]}),
    "a product of small unions": ("json", lambda: product(5, 10, 1)),
    "a product of large unions": ("json", lambda: product(2, 10, 50)),
    "ten thousand properties": ("json", lambda: {"properties": {f"p{i}": {} for i in range(10_000)}}),
    "a thousand patterns": ("json", lambda: {"patternProperties": {f"^a{i}.*b{i}$": {} for i in range(1000)}}),
    "a huge enum": ("json", lambda: {"enum": [f"value {i}" for i in range(12_000)]}),
    "a huge list": ("json", lambda: {"type": "array", "minItems": 10**9, "maxItems": 10**9}),
    "a huge text": ("json", lambda: {"type": "string", "minLength": 10**9, "pattern": "^(a|b)*c"}),
    "huge numbers": ("json", lambda: {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-200}),
    "many divisors": ("json", lambda: {"allOf": [{"type": "integer", "multipleOf": p} for p in (65521, 65519, 65497)]}),
    "a schema that contains itself": ("json", lambda: {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "three nested repetitions": ("regex", lambda: "((a{1,9999}){1,9999}){1,9999}"),
    "a regex with many states": ("regex", lambda: "(" + "|".join(f".*{i}.{{99}}" for i in range(300)) + ")"),
    "an evil regex": ("regex", lambda: "(a|aa|a.)*" * 500 + "b"),
    "a deep regex": ("regex", lambda: "(" * 100_000 + "a" + ")" * 100_000),
    "wide classes": ("regex", lambda: r"(\p{L}\W\S){2000}"),
    "a long choice": ("choice", lambda: ["x" * 25 + str(i) for i in range(9_000)]),
    "doubling terminals": ("grammar", lambda: "start: R0\n" + doubling(1000, ": ", True)),
    "doubling rules": ("grammar", lambda: "start: r0\n" + doubling(1000, ": ", False)),
    "doubling rules of GBNF": ("grammar", lambda: "root ::= r0\n" + doubling(3000, " ::= ", False)),
    "a chain of rules": ("grammar", lambda: "start: r0\n" + links(9999, 'r{0}: r{1} "x"', 'r{0}: "a"')),
    "a chain of terminals": ("grammar", lambda: "start: R0\n" + links(5000, 'R{0}: R{1} "x"', 'R{0}: "a"')),
    "recursive rules of GBNF": (
        "grammar", lambda: "root ::= r0\n" + links(5000, 'r{0} ::= r{1}* | "z" r0', 'r{0} ::= "a"')
    ),
    "an ambiguous grammar": ("grammar", lambda: 'start: s\ns: s s | s s s | "a" |'),
    "a deep grammar": ("grammar", lambda: "start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "repetitions of repetitions": ("grammar", lambda: 'root ::= (("a"{1,9999}){1,9999}){1,9999} root?'),
    "negations": ("grammar", lambda: "start: T\nT: " + " & ".join(f"~/(?s:.*)a.{{{i}}}b(?s:.*)/" for i in range(60))),
    "deep tags": ("structural_tag", lambda: {"format": nested(60, "elements")}),
    "many tags": ("structural_tag", lambda: {
        "structures": [{"begin": f"<a{i}>", "schema": {}, "end": "</a>"} for i in range(4000)], "triggers": ["<a"]
    }),
    "a hundred wide tools": ("tools", lambda: tools(100, 25)),
    "a thousand tools": ("tools", lambda: tools(1000, 1)),
}  # fmt: skip
QUICK = (
    "a chain of references", "deep oneOf", "wide oneOf", "a product of small unions", "a deep regex",
    "doubling rules of GBNF", "a chain of rules", "deep tags",
)  # fmt: skip


@pytest.fixture(scope="module")
def grammar_cache() -> Iterator[GrammarCache]:
    tokenizer = Tokenizer.from_checkpoint(DEMO)
    made = GrammarCache(tokenizer, tokenizer.vocab_size, [tokenizer.eos or 0])
    yield made
    made.close()


async def tried(grammar_cache: GrammarCache, kind: str, value: Any) -> str:
    """What becomes of an attack: the error, or that it is a grammar like another."""
    try:
        if kind == "tools":
            outlines = [
                AnswerOutline(AnswerParsers(form), None, RequestedCalls(value, "required"), None)
                for form in (HermesToolParser, Qwen3ToolParser)
            ]
        else:
            requested = find_requested_format(None, {kind: value}, {})
            assert isinstance(requested, RequestedFormat)
            outlines = [AnswerOutline(AnswerParsers(), requested, None, None)]
        for outline in outlines:
            await grammar_cache.get_grammar(
                outline.make_key(),
                lambda o=outline: o.write(grammar_cache.make_writer()),  # type: ignore[misc]
                outline.param,
            )
    except BadRequest as error:
        assert error.param and len(error.message) < 260 and "media" not in error.message, error.message
        return error.message
    return "a grammar"


def run(grammar_cache: GrammarCache, name: str) -> tuple[float, float, str]:
    """Seconds of an attack, the longest pause of the event loop in it, and what became of it."""
    kind, make = ATTACKS[name]
    value = make()
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.01)
            longest = max(longest, time.perf_counter() - start - 0.01)

    async def whole() -> tuple[float, str]:
        # A worker is up, so that its start does not count.
        await tried(grammar_cache, "regex", f"warm {name}")
        pulse = asyncio.create_task(beat())
        start = time.perf_counter()
        reported = await tried(grammar_cache, kind, value)
        took = time.perf_counter() - start
        pulse.cancel()
        return took, reported

    took, reported = asyncio.run(whole())
    return took, longest, reported


def check(grammar_cache: GrammarCache, name: str) -> str:
    process = psutil.Process()
    before = process.memory_info().rss
    took, longest, reported = run(grammar_cache, name)
    grown = process.memory_info().rss - before
    assert took < 5 * SECONDS and longest < 5 * SECONDS and grown < 5 * BYTES, (name, took, longest, grown, reported)
    return f"{name:32} {took:5.2f} s, loop paused {longest:4.2f} s, {grown / 2**20:4.0f} MB: {reported[:90]}"


@pytest.mark.parametrize("name", QUICK)
def test_an_attack_costs_little(name: str, grammar_cache: GrammarCache) -> None:
    check(grammar_cache, name)


@pytest.mark.long
def test_all_attacks(grammar_cache: GrammarCache) -> None:
    print()
    for name in ATTACKS:
        print(check(grammar_cache, name))
    good = asyncio.run(tried(grammar_cache, "json", {"type": "object", "properties": {"a": {"type": "integer"}}}))
    assert good == "a grammar", "workers are replaced"


def test_attacks_at_once_do_not_keep_others_from_their_grammar(grammar_cache: GrammarCache) -> None:
    known = {"type": "integer", "minimum": 3}

    async def whole() -> float:
        await tried(grammar_cache, "json", known)
        attacks = [
            asyncio.create_task(tried(grammar_cache, *_attack(name))) for name in ("a chain of rules", "deep oneOf")
        ]
        await asyncio.sleep(0.01)
        start = time.perf_counter()
        assert await tried(grammar_cache, "json", known) == "a grammar"
        took = time.perf_counter() - start
        await asyncio.gather(*attacks)
        return took

    assert asyncio.run(whole()) < SECONDS


def _attack(name: str) -> tuple[str, Any]:
    kind, make = ATTACKS[name]
    return kind, json.loads(json.dumps(make()))
