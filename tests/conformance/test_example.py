"""The example package: found by its entry point alone, passes the suite, serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "backend_numpy"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """As after ``pip install ./examples/backend_numpy``: the package, and its entry point in a dist-info folder."""
    info = tmp_path / "trencadis_numpy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trencadis-numpy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[trencadis.backends]\nnumpy = trencadis_numpy:make_backend\n")
    paths = os.pathsep.join(map(str, (ROOT, EXAMPLE, tmp_path)))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def python(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *words], env=environment, capture_output=True, text=True)


def test_passes_by_entry_point(environment: dict[str, str]) -> None:
    """Greedy tokens are those of the test below; all checks run in the long test."""
    done = python(environment, "-m", "trencadis.server.cli.main", "check-backend", "numpy", "--quick", "--json",
                  "--only", "op.,padding,tokens.sampled")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["passed"] and report["label"] == "numpy" and len(report["results"]) > 18
    inherited = {"patches", "gather_rows", "scatter_rows", "sample", "reset", "pool", "layer_norm", "act", "act_mul",
                 "pack_experts", "experts", "interpolate"}  # fmt: skip
    assert set(report["inherited"]) == inherited


@pytest.mark.long
def test_passes_everything(environment: dict[str, str]) -> None:
    done = python(environment, "-m", "trencadis.server.cli.main", "check-backend", "numpy")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_answers_offline_and_is_listed(environment: dict[str, str]) -> None:
    """``--device numpy`` through the whole engine, beside the CPU's answer; an unknown name lists it."""
    code = """
from trencadis import LLM, SamplingParams
from trencadis.core.errors import StartupError
asked = [{"role": "user", "content": "Who are you?"}]
answers = [
    LLM(device=d, dtype="float32", max_model_len=256, kv_cache_memory_bytes="4MiB").chat(
        asked, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids
    for d in ("numpy", "cpu")
]
assert answers[0] == answers[1] and answers[0], answers
try:
    LLM(device="nosuch")
except StartupError as error:
    print(error)
"""
    done = python(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "unknown device 'nosuch'; available: cpu, cuda, hpu, numpy" in done.stdout


def test_plan_knows_its_policy(environment: dict[str, str]) -> None:
    done = python(environment, "-m", "trencadis.server.cli.main", "plan", "--memory", "8GiB", "--device", "numpy")
    assert done.returncode == 0, done.stderr


def test_is_small_and_stands_alone() -> None:
    files = [EXAMPLE / "pyproject.toml", *EXAMPLE.rglob("*.py")]
    assert sum(len(f.read_text().splitlines()) for f in files) < 400
    assert 'numpy = "trencadis_numpy:make_backend"' in files[0].read_text()
