"""Harmony, the form of gpt-oss: channels become reasoning, content and calls, however the text was divided."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.calls.conftest import read_answer
from tests.calls.test_chat_tools import SCHEMAS, TOOLS, joined, whole
from tests.calls.test_openai_client import client as client
from tests.fakes.scripted_app import ScriptedApp
from tests.fakes.text_checkpoint import TEMPLATE
from tests.traffic.written_calls import pieces
from trencadis.server.prompts.answer_reader import AnswerReader
from trencadis.server.tools.harmony_parser import HARMONY, MARKS, HarmonyReasoningParser, HarmonyToolParser
from trencadis.server.tools.parser_registry import find_reasoning_format, find_tool_parser

THOUGHT = "<|channel|>analysis<|message|>I look <up>.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln", "days": 2}<|call|>'
ARGUMENTS = '{"city": "Köln", "days": 2}'
ROLE_CALL = f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
FINAL = "<|channel|>final<|message|>It is 3.\n<|return|>"
MADE = [("get_weather", {"city": "Köln", "days": 2})]
CASES: dict[str, tuple[str, str, str | None, list[tuple[str, Any]]]] = {
    "reasoning and answer": (THOUGHT + FINAL, "I look <up>.", "It is 3.\n", []),
    "reasoning and a call": (THOUGHT + CALL, "I look <up>.", "", MADE),
    "the recipient in the role": (THOUGHT.removesuffix("<|start|>assistant") + ROLE_CALL, "I look <up>.", "", MADE),
    "a call without its end": (CALL.removesuffix("<|call|>"), "", "", MADE),
    "text before a call": (
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant" + CALL, "", "First.", MADE,
    ),
    "no header": ("It is 3.\n", "", "It is 3.\n", []),
    "an answer alone": (FINAL, "", "It is 3.\n", []),
    "reasoning that was cut off": ("<|channel|>analysis<|message|>I loo", "I loo", "", []),
    "a header that was cut off": ("<|channel|>anal", "", "", []),
    "a call without a name": (CALL.replace("get_weather", ""), "", None, []),
    "two calls": (THOUGHT + CALL + "<|start|>assistant" + CALL, "I look <up>.", "", MADE * 2),
}  # fmt: skip


def read(parts: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    return read_answer(
        AnswerReader(HarmonyReasoningParser(HARMONY.start, HARMONY.end), HarmonyToolParser(SCHEMAS)), parts
    )


@pytest.mark.parametrize("case", CASES)
def test_channels_are_told_apart(case: str) -> None:
    text, reasoning, content, calls = CASES[case]
    rng = random.Random(case)
    whole_text = read([text])
    assert whole_text[0] == reasoning and whole_text[2] == calls
    assert content is None or whole_text[1] == content
    for _ in range(20):
        assert read(pieces(text, rng)) == whole_text
    assert read(list(text)) == whole_text


def test_a_template_with_channels_chooses_both_forms() -> None:
    template = "{% if tools %}{{ tools }}{% endif %}<|start|>assistant<|channel|>final<|message|>"
    assert find_tool_parser("auto", template) is find_tool_parser("openai", None) is HarmonyToolParser
    assert find_reasoning_format("auto", template) is find_reasoning_format("openai_gptoss", None) is HARMONY
    assert HARMONY.marks == MARKS


HARMONY_TEMPLATE = TEMPLATE + "{# tools <|channel|> #}"


@pytest.fixture
def harness(serve: Any) -> ScriptedApp:
    made: ScriptedApp = serve(HARMONY_TEMPLATE, THOUGHT + CALL)
    return made


def test_chat_answers_with_reasoning_and_calls(serve: Any, harness: ScriptedApp) -> None:
    choice = harness.chat(tools=TOOLS).json()["choices"][0]
    content, calls, reason = whole(choice)
    assert (choice["message"]["reasoning"], content, reason) == ("I look <up>.", None, "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == MADE
    made = joined(harness, harness.chat(tools=TOOLS, stream=True))[0]
    assert made["reasoning"] == "I look <up>." and [(n, json.loads(a)) for _, n, a in made["calls"]] == MADE
    said = serve(HARMONY_TEMPLATE, THOUGHT + FINAL.removesuffix("<|return|>")).chat().json()["choices"][0]["message"]
    assert (said["reasoning"], said["content"]) == ("I look <up>.", "It is 3.\n")


def test_the_official_client_reads_them(client: Any) -> None:
    made = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS)
    call = made.choices[0].message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == MADE[0] and made.choices[0].finish_reason == "tool_calls"


def test_responses_and_messages_have_the_same_parts(harness: ScriptedApp) -> None:
    tool: Any = TOOLS[0]["function"]
    asked: Any = {"model": "m", "input": "?", "tools": [{"type": "function", **tool}]}
    output = harness.call("/v1/responses", asked).json()["output"]
    assert [one["type"] for one in output] == ["reasoning", "function_call"]
    assert json.loads(output[1]["arguments"]) == MADE[0][1]
    asked = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "?"}],
             "tools": [{"name": tool["name"], "input_schema": tool["parameters"]}]}  # fmt: skip
    blocks = harness.call("/v1/messages", asked).json()["content"]
    used = [one for one in blocks if one["type"] == "tool_use"]
    assert [(one["name"], one["input"]) for one in used] == MADE
