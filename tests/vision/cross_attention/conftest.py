"""Small checkpoints of a family whose layers attend to images, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vision.cross_attention.mllama_oracle import FIRST, FORMS, MllamaOracle, write


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``made(form)``: its folder."""
    return cache(lambda form: write(tmp_path_factory.mktemp("mllama"), **FORMS[form]))


@pytest.fixture(scope="session")
def reference(made: Any) -> Callable[[str], MllamaOracle]:
    """``reference(form)``: the checkpoint in transformers."""
    return cache(lambda form: MllamaOracle(made(form)))


@pytest.fixture(scope="session")
def path(made: Any) -> Path:
    """The first form's folder."""
    found: Path = made(FIRST)
    return found
