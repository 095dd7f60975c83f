"""Which parser reads an answer: by the template, by the flag, by a package; and what templates want of a history."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from tests.calls.test_chat_tools import TOOLS, history, whole
from tests.fakes.text_checkpoint import TEMPLATE
from tests.traffic.tool_templates import HERMES, OPENED, TEMPLATES, THINKING
from trencadis.core.errors import StartupError
from trencadis.server.prompts.answer_reader import AnswerReader
from trencadis.server.text.incremental_parser import Wait
from trencadis.server.tools import parser_registry
from trencadis.server.tools.parser_registry import (
    REASONING_GROUP,
    TOOL_GROUP,
    TOOL_PARSERS,
    find_reasoning_format,
    find_tool_parser,
)
from trencadis.server.tools.reasoning_parser import ReasoningFormat
from trencadis.server.tools.tool_parser import ToolParser

OPEN, CLOSE = "<<", ">>"
SHOUT_FORM = ReasoningFormat("((", "))")


class ShoutParser(ToolParser):
    """``<<name>>`` is a call without arguments."""

    tags = (OPEN, CLOSE)

    def parse(self) -> Wait[None]:
        while (yield from self.read_content_until(OPEN)):
            yield from self.try_calls(self._call, OPEN)

    def _call(self) -> Wait[bool]:
        name = yield from self.read_word()
        if not self.is_accepted_name(name) or not (yield from self.take_literal(CLOSE)):
            return False
        self.start_call(name)
        self.add_arguments("{}")
        return True


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_template_shows_its_form(style: str) -> None:
    assert find_tool_parser("auto", TEMPLATES[style]) is TOOL_PARSERS[style]
    assert find_tool_parser("auto", TEMPLATES[style].replace("tools", "others")) is None, "a template without tools"


def test_flags_name_forms_and_vllm_s_names_mean_the_same() -> None:
    assert find_tool_parser("auto", TEMPLATE) is None and find_tool_parser("auto", None) is None
    assert {name: find_tool_parser(name, HERMES) for name in TOOL_PARSERS} == TOOL_PARSERS
    assert find_tool_parser("qwen3_coder", None) is find_tool_parser("qwen3_xml", None) is TOOL_PARSERS["qwen3"]
    assert find_tool_parser("granite4", None) is TOOL_PARSERS["hermes"]
    assert find_tool_parser("llama4_pythonic", None) is TOOL_PARSERS["pythonic"]
    assert (
        find_reasoning_format("auto", TEMPLATE)
        is find_reasoning_format("auto", None)
        is find_reasoning_format("none", OPENED)
        is None
    )
    assert (
        find_reasoning_format("auto", OPENED)
        == find_reasoning_format("<think> , </think>", None)
        == find_reasoning_format("qwen3", None)
    )
    with pytest.raises(StartupError, match=r"--tool-call-parser kimi is none of auto, hermes, qwen3, .*pythonic"):
        find_tool_parser("kimi", None)
    for wrong in ("glm45", "<a>,", ",", "<a>,<a>"):
        with pytest.raises(
            StartupError,
            match=r"--reasoning-parser .*: use auto, none, qwen3, deepseek_r1, openai_gptoss, gemma4, or two tags",
        ):
            find_reasoning_format(wrong, None)


def test_packages_offer_parsers_by_entry_points(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(group: str) -> list[EntryPoint]:
        here = f"{__name__}:"
        made = {
            TOOL_GROUP: {"shout": here + "ShoutParser", "wrong": here + "OPEN", "gone": "no_such_module:x"},
            REASONING_GROUP: {"round": here + "SHOUT_FORM", "wrong": here + "OPEN", "gone": "no_such_module:x"},
        }
        return [EntryPoint(name, value, group) for name, value in made[group].items()]

    monkeypatch.setattr(parser_registry, "entry_points", offered)
    harness = serve(TEMPLATE, "((why))Now <<now>> or << never>>", tool_call_parser="shout", reasoning_parser="round")
    choice = harness.chat(tools=TOOLS).json()["choices"][0]
    assert whole(choice) == ("Now or << never>>", [("now", "{}")], "tool_calls")
    assert choice["message"]["reasoning"] == "why"
    with pytest.raises(StartupError, match=r"none of auto, hermes, .*, gone, shout, wrong"):
        find_tool_parser("other", None)
    for name, reported in (("wrong", "its entry point must be a"), ("gone", "its package failed")):
        for form in (find_tool_parser, find_reasoning_format):
            with pytest.raises(StartupError, match=reported):
                form(name, None)


def test_a_template_that_prints_arguments_gets_them_as_text(serve: Any) -> None:
    for printed in ("'A' + c.function.arguments", "c.function.arguments"):
        template = HERMES.replace("c.function.arguments | tojson", printed)
        harness = serve(template)
        response = harness.call("/v1/chat/completions", {"messages": history()})
        assert response.status_code == 200 and harness.service.template.text_arguments
        shown = harness.tokenizer.decode(harness.engine.submitted[0][0].tokens, False)
        assert '{"city": "Köln <b>"}' in shown
        assert harness.service.template.string_roles == frozenset()
    assert not any(serve(t).service.template.text_arguments for t in TEMPLATES.values())


def test_tool_messages_are_strings_where_only_other_roles_have_parts(serve: Any) -> None:
    roles = {style: serve(template).service.template.string_roles for style, template in TEMPLATES.items()}
    assert roles.pop("hermes") == frozenset() and set(roles.values()) == {frozenset({"tool"})}
    assert "tool" in serve(THINKING).service.template.string_roles


def test_an_answer_without_parsers_is_content() -> None:
    reader = AnswerReader(None, None)
    reader.feed("<think>a</think>")
    reader.finish()
    assert reader.take_part().content == "<think>a</think>" and not reader.thinks and not reader.complete
