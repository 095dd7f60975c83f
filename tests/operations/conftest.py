"""A scripted application, and the records that the log gets."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.process.log_setup import JsonLines


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small tokenizer's folder, written once per run."""
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def harness(checkpoint: Path) -> ScriptedApp:
    """An application over a scripted engine, for one test."""
    return scripted_app(checkpoint)


class JsonLog(logging.Handler):
    """Keeps each record as ``--log-format json`` writes it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(JsonLines())
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    def of(self, event: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [made for line in self.text if (made := json.loads(line)).get("event") == event]


@pytest.fixture
def json_log() -> Iterator[JsonLog]:
    """What the log gets, from INFO on."""
    handler = JsonLog()
    loggers = [logging.getLogger(name) for name in ("trencadis", "uvicorn.access")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler
    for logger, level in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)
