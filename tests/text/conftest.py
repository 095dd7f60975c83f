"""The small tokenizer's checkpoint, written once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.text_checkpoint import write_text_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and a Qwen2.5-VL-like template."""
    return write_text_checkpoint(tmp_path_factory.mktemp("checkpoint"))
