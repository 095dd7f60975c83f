"""Flags about answers, requests and media that vLLM has too: what each of them changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis import __version__
from trencadis.core.config import EngineConfig
from trencadis.multimodal.sources.fetch import MAX_REDIRECTS
from trencadis.server.cli import run
from trencadis.server.config import hub
from trencadis.server.config.config import ServerConfig
from trencadis.server.config.settings import Settings
from trencadis.server.grammars.asked import asked_form
from trencadis.server.grammars.writer import Spaces
from trencadis.server.http.wiring import media_rules
from trencadis.server.prompts.answer_forms import AnswerForms
from trencadis.server.prompts.constraints import Outline, WantedCalls
from trencadis.server.routes import chat
from trencadis.server.tools.forms import BUILT

JSON = {"type": "json_object"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> ScriptedApp:
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
    rig: ScriptedApp, flags: dict[str, Any], ranks: int, shown: str
) -> None:
    rig.app(engine=EngineConfig(tensor_parallel_size=ranks), **flags)
    assert re.fullmatch(shown, str(rig.chat().json()["system_fingerprint"]))
    assert re.fullmatch(shown, str(rig.complete().json()["system_fingerprint"]))


def test_a_request_may_name_any_model_where_names_are_not_checked(rig: ScriptedApp) -> None:
    rig.app()
    assert rig.chat(model="gpt-9").status_code == 404
    rig.app(skip_model_name_validation=True)
    answer = rig.chat(model="gpt-9")
    assert (answer.status_code, answer.json()["model"]) == (200, "m")
    assert rig.chat(model="alias").json()["model"] == "alias"


def test_the_servers_options_of_forms_hold_unless_a_request_says_otherwise(rig: ScriptedApp) -> None:
    usual = {"disable_any_whitespace": True, "disable_additional_properties": True}
    form = asked_form(JSON, None, {}, usual)
    assert form is not None and form.spaces == Spaces("") and form.closed
    form = asked_form(None, {"json": {}, "disable_any_whitespace": False}, {}, usual)
    assert form is not None and form.spaces == Spaces() and form.closed
    form = asked_form(None, {"json": {}, "disable_any_whitespace": None}, {}, usual)
    assert form is not None and form.spaces == Spaces("")
    assert asked_form(None, None, {}, usual) is None


@pytest.mark.parametrize("level", ["auto", "function", "parameter"])
def test_the_level_of_strictness_reaches_the_grammar(
    rig: ScriptedApp, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []

    async def look(book: Any, forms: Any, tokenizer: Any, prompt: Any, asked: Any, calls: Any, **more: Any) -> None:
        seen.append((asked, calls))

    monkeypatch.setattr(chat, "constrain", look)
    rig.app(tool_call_parser="hermes", tool_strict_level=level, disable_any_whitespace=True)
    assert rig.chat(tools=[TOOL], response_format=JSON).status_code == 200
    [(asked, calls)] = seen
    assert calls.level == level and asked.spaces == Spaces("")


def test_a_level_holds_calls_to_their_form() -> None:
    forms = AnswerForms(BUILT["hermes"])
    outlines = {level: Outline(forms, None, WantedCalls([TOOL], None, True, level), None) for level in
                ("auto", "function", "parameter")}  # fmt: skip
    assert {level: outline.free for level, outline in outlines.items()} == {
        "auto": True, "function": False, "parameter": False,
    }  # fmt: skip
    assert len({outline.key() for outline in outlines.values()}) == 3


def test_tools_that_may_not_be_called_are_kept_from_the_template(
    rig: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    made = type(rig.service).chat_prompt

    async def look(self: Any, *args: Any, **named: Any) -> Any:
        seen.append(named["tools"])
        return await made(self, *args, **named)

    monkeypatch.setattr(type(rig.service), "chat_prompt", look)
    for excluded in (False, True):
        rig.app(tool_call_parser="hermes", exclude_tools_when_tool_choice_none=excluded)
        assert rig.chat(tools=[TOOL], tool_choice="none").status_code == 200
    rig.chat(tools=[TOOL], tool_choice="auto")
    assert [bool(tools) for tools in seen] == [True, False, True]


def test_redirects_to_media_can_be_turned_off() -> None:
    for follows, hops in ((True, MAX_REDIRECTS), (False, 0)):
        loader = media_rules(ServerConfig(media_redirects=follows)).loader(1.0)
        assert loader._fetcher.max_redirects == hops


def test_a_tokenizer_has_a_revision_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def resolve(name: str, revision: str = "", *more: Any) -> Path:
        asked.append((name, revision))
        return tmp_path

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.setattr(hub, "load_config", lambda path, **how: None)
    for config in (
        EngineConfig("a/b", revision="r"),
        EngineConfig("a/b", revision="r", tokenizer_revision="t"),
        EngineConfig("a/b", revision="r", tokenizer="c/d"),
        EngineConfig("a/b", tokenizer="c/d", tokenizer_revision="t"),
    ):
        asked.clear()
        made = run.find_model(Settings(config, ServerConfig(), {}, [])).engine
        others = [one for one in asked if one != ("a/b", config.revision)]
        named = config.tokenizer or ("a/b" if config.tokenizer_revision else "")
        assert others == ([(named, config.tokenizer_revision)] if named else [])
        assert made.tokenizer == (str(tmp_path) if named else "")
