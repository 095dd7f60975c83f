"""Matchers over the vocabulary of the demo, and over one in which tags of some models are tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.random_inputs.grammar_draws import GrammarDraws
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
TAGS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[THINK]", "[/THINK]"]


@pytest.fixture(scope="session")
def demo() -> GrammarDraws:
    return GrammarDraws(Tokenizer.from_checkpoint(DEMO))


@pytest.fixture(scope="session")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> GrammarDraws:
    return GrammarDraws(Tokenizer.from_checkpoint(write_text_checkpoint(tmp_path_factory.mktemp("tagged"), TAGS)))
