"""Grammars of calls: the parser of each form reads what its grammar writes, and the arguments fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.random_inputs.grammar_draws import GrammarDraws
from tests.random_inputs.schema_instances import validator
from trencadis.core.errors import BadRequest
from trencadis.server.prompts.answer_grammar import AnswerOutline, RequestedCalls
from trencadis.server.prompts.answer_reader import AnswerParsers, AnswerPart, AnswerReader
from trencadis.server.protocol.tool_definitions import get_schemas
from trencadis.server.tools.parser_registry import TOOL_PARSERS
from trencadis.server.tools.reasoning_parser import THINK

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "spot": {"$ref": "#/$defs/spot"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"spot": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
    },
}
CODE: dict[str, Any] = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}}},
}
NOTHING: dict[str, Any] = {"name": "now"}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CODE, NOTHING)]
STRICT = [{"type": "function", "function": {**one, "strict": True}} for one in (WEATHER, CODE, NOTHING)]


def grammar(draws: GrammarDraws, form: str, tools: list[Any], choice: Any, many: bool = True, **more: Any) -> str:
    outline = AnswerOutline(
        AnswerParsers(TOOL_PARSERS[form]), None, RequestedCalls(tools, choice, many), more.get("thought")
    )
    return outline.write(draws.writer())


def read(form: str, tools: list[Any], text: str) -> AnswerPart:
    reader = AnswerReader(None, TOOL_PARSERS[form](get_schemas(tools)))
    reader.feed(text)
    reader.finish()
    return reader.take_part()


def check(part: AnswerPart, tools: list[Any]) -> None:
    held = get_schemas(tools)
    for call in part.calls:
        validator({"type": "object", **held[call.name]}).validate(json.loads(call.arguments))


@pytest.mark.parametrize(
    ("form", "vocabulary"), [*((form, "tagged") for form in sorted(TOOL_PARSERS)), ("mistral", "demo")]
)
def test_required_calls_are_read_whole_and_fit(form: str, vocabulary: str, request: pytest.FixtureRequest) -> None:
    draws: GrammarDraws = request.getfixturevalue(vocabulary)
    matcher = draws.matcher(grammar(draws, form, TOOLS, "required"))
    texts = [text for i in range(8) if (text := draws.draw(matcher, i)) is not None]
    assert len(texts) >= 2
    for text in texts:
        part = read(form, TOOLS, text)
        assert part.calls and not part.content, text
        check(part, TOOLS)


@pytest.mark.parametrize("form", sorted(TOOL_PARSERS))
def test_a_named_function_is_the_one_that_is_called_once(form: str, tagged: GrammarDraws) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    matcher = tagged.matcher(grammar(tagged, form, TOOLS, choice))
    for i in range(6):
        text = tagged.draw(matcher, i)
        if text is not None:
            part = read(form, TOOLS, text)
            assert [call.name for call in part.calls] == ["look_up"] and not part.content, text
            check(part, TOOLS)


@pytest.mark.parametrize("form", sorted(TOOL_PARSERS))
def test_text_is_free_until_a_strict_call_begins(form: str, tagged: GrammarDraws) -> None:
    made = grammar(tagged, form, STRICT, "auto")
    calls = grammar(tagged, form, STRICT, "required", many=False)
    assert tagged.accepts(made, "It is 21 degrees.\nSee {this}.") and tagged.accepts(made, "")
    called = 0
    for i in range(8):
        text = tagged.draw(calls, i)
        if text is not None:
            assert tagged.accepts(made, text), text
            called += 1
    assert called
    for i in range(8):
        text = tagged.draw(made, i, 120)
        if text is not None:
            check(read(form, STRICT, text), STRICT)


def test_one_call_only_where_that_is_asked_for(demo: GrammarDraws) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    one, many = (grammar(demo, "hermes", TOOLS, "required", many) for many in (False, True))
    assert demo.accepts(one, call) and not demo.accepts(one, f"{call}\n{call}")
    assert demo.accepts(many, call) and demo.accepts(many, f"{call}\n{call}")


def test_arguments_that_the_schema_forbids_have_no_text(demo: GrammarDraws) -> None:
    made = grammar(demo, "hermes", TOOLS, "required")

    def call(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'

    assert demo.accepts(made, call('{"city": "Köln", "days": 3}'))
    assert not demo.accepts(made, call('{"city": "Köln"}'))
    assert not demo.accepts(made, call('{"city": "Köln", "days": 15}'))
    assert not demo.accepts(made, call('{"city": "Köln", "days": 3, "more": 1}'))


def test_tools_that_are_not_strict_may_be_called_with_any_object(demo: GrammarDraws) -> None:
    odd = {"type": "object", "not": {"required": ["a"]}}
    loose = {"type": "function", "function": {"name": "f", "parameters": odd}}
    made = grammar(demo, "hermes", [loose, *STRICT], "auto")
    assert demo.accepts(made, '<tool_call>\n{"name": "f", "arguments": {"b": [1]}}\n</tool_call>')
    for form in ("qwen3", "pythonic"):
        with pytest.raises(BadRequest, match="'not' is not supported"):
            grammar(demo, form, [loose, *STRICT], "auto")


def test_a_keyword_without_a_grammar_is_named_with_its_path(demo: GrammarDraws) -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}
    for choice in ("required", "auto", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(BadRequest, match="'not' is not supported") as caught:
            grammar(demo, "hermes", [TOOLS[0], tool], choice)
        assert caught.value.param == "tools[1].function.parameters.properties.a.not"


def test_forms_that_write_parameters_one_by_one_refuse_what_concerns_several(demo: GrammarDraws) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    for form in ("qwen3", "pythonic"):
        with pytest.raises(BadRequest, match="nothing that concerns several"):
            grammar(demo, form, [tool], "required")


ONE_BY_ONE = {
    "qwen3": ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", "<parameter=b>\n2\n</parameter>\n",
              "</function>\n</tool_call>"),
    "pythonic": ("[f(a=1", ", b=2", ")]"),
    "lfm2": ("<|tool_call_start|>[f(a=1", ", b=2", ")]<|tool_call_end|>"),
    "gemma4": ("<|tool_call>call:f{a:1", ",b:2", "}<tool_call|>"),
}  # fmt: skip
"""Form -> a call of two parameters in three pieces, of which the second is ``b``."""


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_a_required_name_that_no_property_describes_is_written_or_refused(form: str, demo: GrammarDraws) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b", "a"]}

    def tools(**more: Any) -> list[Any]:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters | more, "strict": True}}]

    head, item, end = ONE_BY_ONE[form]
    for choice in ("required", "auto"):
        given = tools(additionalProperties={"type": "integer"})
        made = grammar(demo, form, given, choice)
        assert demo.accepts(made, head + item + end)
        assert choice == "auto" or not demo.accepts(made, head + end)
        part = read(form, given, head + item + end)
        assert json.loads(part.calls[0].arguments) == {"a": 1, "b": 2}
        with pytest.raises(BadRequest, match=r"required\.b: the schema requires this name and allows no value"):
            grammar(demo, form, tools(additionalProperties=False), choice)
        if form in ("qwen3", "gemma4"):  # no text there would fit any type
            with pytest.raises(BadRequest, match="in this form of calls a grammar takes"):
                grammar(demo, form, tools(), choice)
        else:
            assert demo.accepts(grammar(demo, form, tools(), "required"), head + item.replace("2", '["x"]') + end)


def test_a_name_that_its_form_cannot_spell_is_refused(demo: GrammarDraws) -> None:
    for form, name in (("qwen3", "a>b"), ("qwen3", "a\nb"), ("pythonic", "a b"), ("gemma4", "a:b")):
        parameters = {"type": "object", "properties": {name: {"type": "string"}}}
        with pytest.raises(BadRequest, match="such a name has no place"):
            grammar(demo, form, [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")


@pytest.mark.parametrize(("schema", "why"), [
    ({"enum": ["a</parameter>"]}, "takes texts without </parameter>"), ({"type": "string", "const": 5}, "takes texts"),
    ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength .3. is greater than maxLength .1."),
])  # fmt: skip
def test_a_text_that_no_answer_can_hold_is_refused_in_one_line(schema: Any, why: str, demo: GrammarDraws) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(BadRequest, match=why) as caught:
        grammar(demo, "qwen3", [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")
    assert "\n" not in str(caught.value)


def test_a_thought_stands_before_the_calls(demo: GrammarDraws) -> None:
    tags = (THINK.start, THINK.end)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    closed, inside, over = (
        grammar(demo, "hermes", TOOLS, "required", thought=(*tags, *state))
        for state in ((False, False), (True, False), (False, True))
    )
    thought = "Let me see {\n"
    states = (closed, inside, over)
    assert [demo.accepts(g, f"<think>{thought}</think>\n\n{call}") for g in states] == [True, True, False]
    assert [demo.accepts(g, f"{thought}</think>{call}") for g in states] == [False, True, False]
    assert [demo.accepts(g, call) for g in states] == [True, False, True]
