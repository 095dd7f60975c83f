"""The emulated card's tests under other Pythons and torches, which this machine need not have.

TRENCADIS_TEST_PYTHONS names their Pythons with colons between, each with the packages of ``.[test]`` and a torch, such
as 2.6 (the oldest that is claimed), 2.9, or this one's under Python 3.12:

    TRENCADIS_TEST_PYTHONS=/opt/t26/bin/python:/opt/py312/bin/python \\
        python -m pytest -m long -s tests/e2e/test_other_torches.py
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = [p for p in os.environ.get("TRENCADIS_TEST_PYTHONS", "").split(":") if p]
TESTS = (
    "tests/e2e/test_hpu_served.py",
    "tests/hpu/test_serving.py",
    "tests/hpu/test_ops.py",
    "tests/hpu/start/test_bridge.py",
)
COMPILED = "tests/hpu/compiled"
"""Compile mode, which is refused before torch 2.9."""


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS or [""])
def test_the_emulated_card_serves(python: str) -> None:
    if not python:
        pytest.skip("TRENCADIS_TEST_PYTHONS names no Python with another torch")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PT_HPU", "TORCH_", "VIRTUAL_ENV"))}
    code = "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"
    reported = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip()
    old = re.search(r"torch 2\.[0-8]\.", reported)
    line = [python, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, *([] if old else [COMPILED])]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    ended = [x for x in done.stdout.splitlines() if " passed" in x or " failed" in x]
    print(f"\n{reported}: {ended[-1] if ended else done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout[-4000:]
