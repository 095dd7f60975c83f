"""Flags about answers, requests and media that vLLM has too: what each of them changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_line import from_command_line
from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis import __version__
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.multimodal.sources.http_fetch import MAX_REDIRECTS
from trencadis.server.cli import serve
from trencadis.server.config import model_download
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.grammars.lark_grammar_and_tool_functions import WhitespaceRule
from trencadis.server.grammars.response_format import find_requested_format
from trencadis.server.processes.build_app import make_media_rules
from trencadis.server.prompts.answer_grammar import AnswerOutline, RequestedCalls
from trencadis.server.prompts.answer_reader import AnswerParsers
from trencadis.server.routes import serving_chat
from trencadis.server.tools.parser_registry import TOOL_PARSERS

JSON = {"type": "json_object"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
    return scripted_app(write_text_checkpoint(tmp_path_factory.mktemp("flags")))


@pytest.mark.parametrize(
    ("flags", "ranks", "shown"),
    [
        ({}, 1, rf"trencadis-{__version__}-\w{{8}}"),
        ({}, 4, rf"trencadis-{__version__}-tp4-\w{{8}}"),
        ({"fingerprint_mode": "hash"}, 4, rf"trencadis-{__version__}-\w{{8}}"),
        ({"fingerprint_mode": "custom", "fingerprint_value": "mine"}, 1, "mine"),
        ({"fingerprint_mode": "none"}, 1, "None"),
    ],
)
def test_the_fingerprint_is_what_the_operator_chose(
    harness: ScriptedApp, flags: dict[str, Any], ranks: int, shown: str
) -> None:
    harness.app(engine=EngineConfig(tensor_parallel_size=ranks), **flags)
    assert re.fullmatch(shown, str(harness.chat().json()["system_fingerprint"]))
    assert re.fullmatch(shown, str(harness.complete().json()["system_fingerprint"]))


def test_a_request_may_name_any_model_where_names_are_not_checked(harness: ScriptedApp) -> None:
    harness.app()
    assert harness.chat(model="gpt-9").status_code == 404
    harness.app(skip_model_name_validation=True)
    answer = harness.chat(model="gpt-9")
    assert (answer.status_code, answer.json()["model"]) == (200, "m")
    assert harness.chat(model="alias").json()["model"] == "alias"


def test_the_servers_options_of_forms_hold_unless_a_request_says_otherwise(harness: ScriptedApp) -> None:
    usual = {"disable_any_whitespace": True, "disable_additional_properties": True}
    form = find_requested_format(JSON, None, {}, usual)
    assert form is not None and form.spaces == WhitespaceRule("") and form.closed
    form = find_requested_format(None, {"json": {}, "disable_any_whitespace": False}, {}, usual)
    assert form is not None and form.spaces == WhitespaceRule() and form.closed
    form = find_requested_format(None, {"json": {}, "disable_any_whitespace": None}, {}, usual)
    assert form is not None and form.spaces == WhitespaceRule("")
    assert find_requested_format(None, None, {}, usual) is None


@pytest.mark.parametrize("level", ["auto", "function", "parameter"])
def test_the_level_of_strictness_reaches_the_grammar(
    harness: ScriptedApp, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []

    async def look(book: Any, forms: Any, tokenizer: Any, prompt: Any, requested: Any, calls: Any, **more: Any) -> None:
        seen.append((requested, calls))

    monkeypatch.setattr(serving_chat, "add_answer_grammar", look)
    harness.app(tool_call_parser="hermes", tool_strict_level=level, disable_any_whitespace=True)
    assert harness.chat(tools=[TOOL], response_format=JSON).status_code == 200
    [(requested, calls)] = seen
    assert calls.level == level and requested.spaces == WhitespaceRule("")


def test_a_level_holds_calls_to_their_form() -> None:
    forms = AnswerParsers(TOOL_PARSERS["hermes"])
    outlines = {level: AnswerOutline(forms, None, RequestedCalls([TOOL], None, True, level), None) for level in
                ("auto", "function", "parameter")}  # fmt: skip
    assert {level: outline.free for level, outline in outlines.items()} == {
        "auto": True, "function": False, "parameter": False,
    }  # fmt: skip
    assert len({outline.make_key() for outline in outlines.values()}) == 3


def test_tools_that_may_not_be_called_are_kept_from_the_template(
    harness: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    made = type(harness.service).make_chat_prompt

    async def look(self: Any, *args: Any, **named: Any) -> Any:
        seen.append(named["tools"])
        return await made(self, *args, **named)

    monkeypatch.setattr(type(harness.service), "make_chat_prompt", look)
    for excluded in (False, True):
        harness.app(tool_call_parser="hermes", exclude_tools_when_tool_choice_none=excluded)
        assert harness.chat(tools=[TOOL], tool_choice="none").status_code == 200
    harness.chat(tools=[TOOL], tool_choice="auto")
    assert [bool(tools) for tools in seen] == [True, False, True]


def test_redirects_to_media_can_be_turned_off() -> None:
    for follows, hops in ((True, MAX_REDIRECTS), (False, 0)):
        loader = make_media_rules(ServerConfig(media_redirects=follows)).make_loader(1.0)
        assert loader._fetcher.max_redirects == hops


def test_a_tokenizer_has_a_revision_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[str, str]] = []

    def resolve(name: str, revision: str = "", *more: Any) -> Path:
        requested.append((name, revision))
        return tmp_path

    monkeypatch.setattr(model_download, "resolve", resolve)
    monkeypatch.setattr(model_download, "load_config", lambda path, **how: None)
    for config in (
        EngineConfig("a/b", revision="r"),
        EngineConfig("a/b", revision="r", tokenizer_revision="t"),
        EngineConfig("a/b", revision="r", tokenizer="c/d"),
        EngineConfig("a/b", tokenizer="c/d", tokenizer_revision="t"),
    ):
        requested.clear()
        made = serve.find_model(Settings(config, ServerConfig(), {}, [])).engine
        others = [one for one in requested if one != ("a/b", config.revision)]
        named = config.tokenizer or ("a/b" if config.tokenizer_revision else "")
        assert others == ([(named, config.tokenizer_revision)] if named else [])
        assert made.tokenizer == (str(tmp_path) if named else "")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('{"huge": "low"}', "--reasoning-effort-map: 'huge' is none of none, minimal, low"),
        ('{"low": 3}', "--reasoning-effort-map: the value of 'low' must be a text."),
    ],
)
def test_a_map_of_efforts_that_cannot_be_is_one_line(value: str, said: str) -> None:
    with pytest.raises(StartupError) as caught:
        from_command_line(["--reasoning-effort-map", value], {})
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
