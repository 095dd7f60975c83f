"""A scripted engine, a service over the small tokenizer, and an application over both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small tokenizer's folder, written once per run."""
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def harness(checkpoint: Path) -> ScriptedApp:
    """An application over a scripted engine, for one test."""
    return scripted_app(checkpoint)
