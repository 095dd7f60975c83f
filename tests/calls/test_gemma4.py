"""Gemma-4's form: thoughts in a channel and calls with bare names, alone, through the routes, and by our template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.calls.conftest import read_answer, templated_app
from tests.calls.test_chat_tools import TOOLS, history, joined, whole
from tests.fakes.scripted_app import ScriptedApp
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.random_inputs.grammar_draws import GrammarDraws
from tests.traffic.written_calls import SCHEMAS, pieces
from trencadis.core.errors import BadRequest
from trencadis.server.prompts.answer_grammar import AnswerOutline, RequestedCalls
from trencadis.server.prompts.answer_reader import AnswerParsers, AnswerReader
from trencadis.server.tools.gemma4_parser_and_call_grammar import GEMMA4, Gemma4ReasoningParser, Gemma4ToolParser
from trencadis.server.tools.parser_registry import find_reasoning_format, find_tool_parser

SOURCE = (Path(__file__).resolve().parents[2] / "examples" / "templates" / "gemma4.jinja").read_text(encoding="utf-8")
MARKS = [
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|image|>",
]  # fmt: skip
THOUGHT = "<|channel>thought\nI look <up>.\n<channel|>"
CALL = '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'
MADE = [("get_weather", {"city": "Köln", "days": 2})]
CASES: dict[str, tuple[str, str, str, list[tuple[str, Any]]]] = {
    "a thought and a call": (THOUGHT + CALL, "I look <up>.", "", MADE),
    "a thought and an answer": (THOUGHT + "It is 3.\n", "I look <up>.", "It is 3.\n", []),
    "an empty thought": ("<|channel>thought\n<channel|>It is 3.", "", "It is 3.", []),
    "no label": ("<|channel>thoughtful<channel|>It is 3.", "thoughtful", "It is 3.", []),
    "no thought": ("It is 3.", "", "It is 3.", []),
    "two calls": (CALL + CALL, "", "", MADE * 2),
}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small tokenizer with Gemma-4's marks."""
    return write_text_checkpoint(tmp_path_factory.mktemp("gemma4"), MARKS)


def serve(checkpoint: Path, answer: str) -> ScriptedApp:
    return templated_app(checkpoint, SOURCE, answer)


def read(parts: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    return read_answer(
        AnswerReader(Gemma4ReasoningParser("<|channel>", "<channel|>"), Gemma4ToolParser(SCHEMAS)), parts
    )


@pytest.mark.parametrize("case", CASES)
def test_thoughts_content_and_calls_are_told_apart(case: str) -> None:
    text, *expected = CASES[case]
    rng = random.Random(case)
    for parts in ([text], list(text), *(pieces(text, rng) for _ in range(8))):
        assert read(parts) == tuple(expected)


def test_the_flags_and_the_template_choose_the_form() -> None:
    assert find_tool_parser("auto", SOURCE) is find_tool_parser("gemma4", None) is Gemma4ToolParser
    assert find_reasoning_format("auto", SOURCE) is find_reasoning_format("gemma4", None) is GEMMA4


def test_all_three_dialects_answer_with_reasoning_and_calls(marked: Path) -> None:
    harness = serve(marked, THOUGHT + CALL)
    choice = harness.chat(tools=TOOLS).json()["choices"][0]
    content, calls, reason = whole(choice)
    assert (choice["message"]["reasoning"], content, reason) == ("I look <up>.", None, "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == MADE
    made = joined(harness, harness.chat(tools=TOOLS, stream=True))[0]
    assert made["reasoning"] == "I look <up>." and [(n, json.loads(a)) for _, n, a in made["calls"]] == MADE
    tool: Any = TOOLS[0]["function"]
    asked: Any = {"model": "m", "input": "?", "tools": [{"type": "function", **tool}]}
    output = harness.call("/v1/responses", asked).json()["output"]
    assert [one["type"] for one in output] == ["reasoning", "function_call"]
    asked = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "?"}],
             "tools": [{"name": tool["name"], "input_schema": tool["parameters"]}]}  # fmt: skip
    blocks = harness.call("/v1/messages", asked).json()["content"]
    assert [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"] == MADE


def test_the_template_writes_tools_calls_results_and_thoughts(marked: Path) -> None:
    harness = serve(marked, "")
    assert harness.service.template.has_all_specials_marked() and not harness.service.template.text_arguments

    def shown(messages: Any, **fields: Any) -> str:
        assert harness.call("/v1/chat/completions", {"messages": messages, **fields}).status_code == 200
        return harness.tokenizer.decode(harness.engine.submitted[-1][0].tokens, False)

    text = shown([{"role": "system", "content": "Be brief."}, *history()], tools=TOOLS[:1])
    assert text.partition("<|turn>user")[0].endswith(
        '<|turn>system\nBe brief.<|tool>declaration:get_weather{description:<|"|>d<|"|>,parameters:{properties:'
        '{city:{type:<|"|>STRING<|"|>},days:{type:<|"|>INTEGER<|"|>},exact:{type:<|"|>BOOLEAN<|"|>}},'
        'type:<|"|>OBJECT<|"|>}}<tool|><turn|>\n'
    )
    assert text.endswith(
        '<|turn>user\nWeather?<turn|>\n<|turn>model\n<|tool_call>call:get_weather{city:<|"|>Köln <b><|"|>}<tool_call|>'
        '<|tool_response>response:get_weather{value:<|"|>5 degrees<|"|>}<tool_response|>'
    )
    after = shown([*history(), {"role": "assistant", "content": "Five."}, {"role": "user", "content": "Now?"}])
    assert after.endswith("<tool_response|>Five.<turn|>\n<|turn>user\nNow?<turn|>\n<|turn>model\n")
    asked = [{"role": "user", "content": "Hi"}]
    on, off = (shown(asked, chat_template_kwargs={"enable_thinking": on}) for on in (True, False))
    assert "<|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi" in on and on.endswith("<|turn>model\n")
    assert off.endswith("<|turn>model\n<|channel>thought\n<channel|>") and "<|think|>" not in off
    closed = harness.chat(chat_template_kwargs={"enable_thinking": False})
    assert closed.status_code == 200


NESTED: dict[str, Any] = {
    "name": "book",
    "parameters": {
        "type": "object",
        "properties": {
            "who": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]},
            "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            "kind": {"enum": ["a b", 3, None]},
        },
        "required": ["who", "days", "kind"],
        "additionalProperties": False,
    },
}


def test_a_grammar_of_nested_arguments_takes_what_fits_and_nothing_else(marked: Path) -> None:
    from trencadis.server.text.checkpoint_tokenizer import Tokenizer

    draws = GrammarDraws(Tokenizer.from_checkpoint(marked))
    outline = AnswerOutline(
        AnswerParsers(Gemma4ToolParser),
        None,
        RequestedCalls([{"type": "function", "function": NESTED}], "required"),
        None,
    )
    made = outline.write(draws.writer())

    def accepts(inner: str) -> bool:
        return draws.accepts(made, f"<|tool_call>call:book{{{inner}}}<tool_call|>")

    assert accepts('who:{name:<|"|>Ada<|"|>},days:[1,2],kind:<|"|>a b<|"|>') and accepts(
        'who:{name:<|"|><|"|>},days:[1],kind:3'
    )
    for wrong in (
        'who:{name:<|"|>too long<|"|>},days:[1],kind:3',
        "who:{},days:[1],kind:3",
        'who:{name:<|"|>A<|"|>},days:[],kind:3',
        'who:{name:<|"|>A<|"|>},days:[1,2,3],kind:3',
        'who:{name:<|"|>A<|"|>},days:[1],kind:4',
        "days:[1],kind:3",
    ):
        assert not accepts(wrong), wrong
    free = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "array"}}}}
    asked = RequestedCalls([{"type": "function", "function": free}], "required")
    with pytest.raises(BadRequest, match="in this form of calls"):
        AnswerOutline(AnswerParsers(Gemma4ToolParser), None, asked, None).write(draws.writer())


def write_required(function: dict[str, Any], draws: GrammarDraws) -> Any:
    """The grammar of an answer that must call ``function``."""
    calls = RequestedCalls([{"type": "function", "function": function}], "required")
    return AnswerOutline(AnswerParsers(Gemma4ToolParser), None, calls, None).write(draws.writer())


def test_types_that_are_repeated_do_not_multiply_by_level(marked: Path) -> None:
    from trencadis.server.text.checkpoint_tokenizer import Tokenizer

    draws, made = GrammarDraws(Tokenizer.from_checkpoint(marked)), []
    for count in (1, 30):
        inner: dict[str, Any] = {"type": "string"}
        for _ in range(5):
            inner = {"type": ["object"] * count, "properties": {"a": inner}}
        parameters = {"type": "object", "properties": {"a": inner}}
        made.append(write_required({"name": "f", "parameters": parameters}, draws))
    assert made[0] == made[1]


@pytest.mark.parametrize("schema", [
    {"type": "object"}, {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "null"}},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 3},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1},
    {"enum": ["a", 'b<|"|>'], "type": "string"}, {"const": '<|"|>'}, {"type": "integer", "enum": ["a"]},
])  # fmt: skip
def test_a_schema_that_would_be_followed_in_part_is_refused(marked: Path, schema: dict[str, Any]) -> None:
    from trencadis.server.text.checkpoint_tokenizer import Tokenizer

    parameters = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(BadRequest, match="in this form of calls"):
        write_required({"name": "f", "parameters": parameters}, GrammarDraws(Tokenizer.from_checkpoint(marked)))


def test_a_constant_that_spells_a_mark_is_plain_text_and_of_its_type(marked: Path) -> None:
    from trencadis.server.text.checkpoint_tokenizer import Tokenizer

    draws = GrammarDraws(Tokenizer.from_checkpoint(marked))
    schema = {"type": ["number", "string"], "enum": [None, "<turn|>", 3]}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    made = write_required({"name": "f", "parameters": parameters}, draws)

    def accepts(value: str) -> bool:
        return draws.accepts(made, f"<|tool_call>call:f{{a:{value}}}<tool_call|>")

    # ``accepts`` takes marks for tokens: the token would end the answer.
    assert accepts("3") and not accepts("null") and not accepts('<|"|><turn|><|"|>')
    texts = {draws.draw(made, seed) for seed in range(8)}
    assert '<|tool_call>call:f{a:<|"|><turn|><|"|>}<tool_call|>' in texts
