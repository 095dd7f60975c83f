"""An application whose engine answers by a script, with a template and flags of the test's choice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.server.prompts.answer_reader import AnswerReader
from trencadis.server.text.chat_template import ChatTemplate

SPECIAL = ["[TOOL_CALLS]", "<|python_tag|>", "[THINK]", "[/THINK]"]


@pytest.fixture(scope="session")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small tokenizer, in which tags of some models are special tokens."""
    return write_text_checkpoint(tmp_path_factory.mktemp("tagged"), SPECIAL)


def templated_app(checkpoint: Path, template: str, answer: str = "", **flags: Any) -> ScriptedApp:
    """An application over the tokenizer of ``checkpoint``."""
    harness = scripted_app(checkpoint)
    harness.service.template = ChatTemplate(template, harness.tokenizer)
    harness.engine.answer = harness.tokenizer.encode(answer)
    harness.app(**flags)
    return harness


@pytest.fixture
def serve(tagged: Path) -> Callable[..., ScriptedApp]:
    """Makes an application: ``serve(template, answer, **flags)``."""
    return partial(templated_app, tagged)


def read_answer(reader: AnswerReader, parts: Iterable[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Feeds an answer in ``parts``; returns its reasoning, its content, and its calls as (name, decoded arguments)."""
    for part in parts:
        reader.feed(part)
    reader.finish()
    made = reader.take_part()
    calls: dict[int, list[str]] = {}
    for call in made.calls:
        held = calls.setdefault(call.index, ["", ""])
        held[0], held[1] = held[0] + call.name, held[1] + call.arguments
    return made.reasoning, made.content, [(name, json.loads(text)) for name, text in calls.values()]
