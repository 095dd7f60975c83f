"""Structural tags in both shapes: free text in which marks begin parts of a fixed form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.random_inputs.grammar_draws import GrammarDraws
from trencadis.core.errors import BadRequest
from trencadis.server.grammars.response_format import RequestedFormat

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOW = {"type": "object", "maxProperties": 0}
BANNED = {"begin": "<a>", "schema": {"not": {}}, "end": ""}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=now>", "schema": NOW, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def takes(draws: GrammarDraws, value: Any) -> Any:
    matcher = draws.matcher(draws.written(RequestedFormat("structural_tag", value, "tag")))
    return lambda *texts: [draws.accepts(matcher, one) for one in texts]


@pytest.mark.parametrize("shape", ["structures", "format", "text"])
def test_a_trigger_begins_a_form(shape: str, demo: GrammarDraws) -> None:
    tags = [
        tag("<function=weather>", schema(CITY), "</function>"),
        tag("<function=now>", schema({"maxProperties": 0}), "</function>"),
    ]
    new = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="], "tags": tags}}
    reported = takes(demo, {"structures": OLD, "format": new, "text": json.dumps(OLD)}[shape])
    call = '<function=weather>{"city": "Köln"}</function>'
    assert reported("", "No call.", call, f"Let me see.\n{call} and {call}!") == [True] * 4
    assert reported("<function=other>", '<function=weather>{"city": 1}</function>', f"{call}<function=") == [False] * 3


def test_flags_of_triggered_tags(demo: GrammarDraws) -> None:
    part = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag("<a>", text("x"), "</a>")]}
    some = takes(demo, {"format": {**part, "at_least_one": True}})
    assert some("<a>x</a>", "<a>x</a> more<a>x</a>", "text", "text<a>x</a>") == [True, True, False, False]
    once = takes(demo, {"format": {**part, "stop_after_first": True}})
    assert once("text", "text<a>x</a>", "text<a>x</a> more") == [True, True, False]
    both = takes(demo, {"format": {**part, "stop_after_first": True, "at_least_one": True}})
    assert both("<a>x</a>", "<a>x</a>.", "") == [True, False, False]


def test_marks_that_are_control_tokens_are_tokens(demo: GrammarDraws) -> None:
    part = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [tag("<tool_call>", schema(CITY), "</tool_call>")],
    }
    reported = takes(demo, {"format": part})
    assert reported('Hm<tool_call>{"city":"x"}</tool_call>', "<tool_call>x") == [True, False]
    parts = [text("a"), {"type": "token", "token": "<|im_end|>"}]
    token = takes(demo, {"format": {"type": "sequence", "elements": parts}})
    assert token("a<|im_end|>", "a") == [True, False]


def test_free_text_ends_at_its_end(demo: GrammarDraws) -> None:
    thought = tag("[t]", {"type": "any_text"}, ["[/t]", "[/end]"])
    reported = takes(demo, {"format": {"type": "sequence", "elements": [thought, schema(CITY)]}})
    assert reported('[t]a [ b[/t]{"city":"x"}', '[t][/end]{"city":"x"}', '[t]a{"city":"x"}') == [True, True, False]
    inner = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag("<a>", text("x"), "</a>")]}
    nested = takes(demo, {"format": tag("(", inner, ")")})
    assert nested("()", "(text<a>x</a>more)", "(text<a>y</a>)", "(text") == [True, True, False, False]


def test_parts_are_put_together(demo: GrammarDraws) -> None:
    parts = {
        "type": "sequence",
        "elements": [
            {"type": "or", "elements": [text("A"), text("B")]},
            {"type": "optional", "content": text("?")},
            {"type": "star", "content": text("s")},
            {"type": "plus", "content": text("p")},
            {"type": "repeat", "min": 2, "max": 3, "content": {"type": "regex", "pattern": "[0-9]"}},
            {"type": "grammar", "grammar": 'root ::= "g" root | "."'},
            {"type": "any_text", "excludes": ["no"]},
        ],
    }
    reported = takes(demo, {"format": parts})
    assert reported("Ap12.", "B?sspp123gg. and so on", "Ap1.", "A12.", "Ap12.no") == [True, True, False, False, False]


def test_tags_with_a_separator(demo: GrammarDraws) -> None:
    part = {"type": "tags_with_separator", "tags": [tag("<i>", text("x"), "</i>")], "separator": ", "}
    assert takes(demo, {"format": part})("", "<i>x</i>", "<i>x</i>, <i>x</i>", "<i>x</i>,") == [True, True, True, False]
    some = takes(demo, {"format": {**part, "at_least_one": True, "stop_after_first": True}})
    assert some("", "<i>x</i>", "<i>x</i>, <i>x</i>") == [False, True, False]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (3, "tag"),
        ("{", "tag"),
        ({"type": "structural_tag"}, "tag"),
        ({"structures": [], "triggers": []}, "tag.structures"),
        ({"structures": [{"begin": "<a>"}], "triggers": []}, "tag"),
        ({"structures": [{"begin": "<a>"}], "triggers": ["<b"]}, "tag.structures[0].begin"),
        ({"structures": [BANNED], "triggers": ["<"]}, "tag.structures[0].schema.not"),
        ({"format": {"type": "dispatch"}}, "tag.format.type"),
        ({"format": {"type": "sequence", "elements": [{"type": "x"}]}}, "tag.format.elements[0].type"),
        ({"format": {"type": "const_string"}}, "tag.format.value"),
        ({"format": {"type": "token", "token": "<none>"}}, "tag.format.token"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": {}}}, "tag.format"),
    ],
)  # fmt: skip
def test_a_bad_tag_is_named_with_its_path(value: Any, param: str, demo: GrammarDraws) -> None:
    with pytest.raises(BadRequest) as caught:
        demo.written(RequestedFormat("structural_tag", value, "tag"))
    assert caught.value.param == param
