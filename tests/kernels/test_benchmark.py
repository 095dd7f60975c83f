"""The kernels' benchmark runs from a checkout with torch, numpy and triton alone, and says when there is no card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import importlib, sys
from benchmarks.kernels import run as kernels
for name in kernels.MODULES:
    importlib.import_module(f"benchmarks.kernels.{name}")
heavy = {"fastapi", "msgspec", "pydantic", "transformers", "psutil"} & set(sys.modules)
assert not heavy, heavy
sys.argv = ["kernels"]
sys.exit(kernels.main())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", BARE], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "needs an NVIDIA card" in done.stderr and "--interpret" in done.stderr


@pytest.mark.long
def test_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.kernels", "--interpret"], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
