"""Small checkpoints, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.vision.all_families.family_list import WRITERS


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(family)``."""
    return cache(lambda name: WRITERS[name](tmp_path_factory.mktemp(name)))
