"""vLLM's own server tests against this server: each passes, or ``vllm_suite/reasons.toml`` says why it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.compat.vllm_suite.checkpoints import make_checkpoints
from tests.traffic.server_process import ROOT

HERE = Path(__file__).parent
REASONS = HERE / "vllm_suite" / "reasons.toml"
SECONDS = 3600
LEAST = 250
"""Tests that pass at least: fewer, and the suite has not run."""


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder that ``make test-clients`` makes, with the tests, what they import, and checkpoints."""
    made = (Path(os.environ.get("CLIENTS", ROOT / ".clients")) / "vllm").resolve()
    command = ["make", f"CLIENTS={made.parent}", f"{made}/.installed"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"vLLM's tests cannot be had here: {built.stderr[-300:]}")
    make_checkpoints(made / "models")
    return made


def test_every_reason_is_a_sentence_and_stands_once() -> None:
    listed = tomllib.loads(REASONS.read_text())
    names = [name for table in listed.values() for name in table]
    assert len(names) == len(set(names)) and set(listed) == {"not served", "documented", "words", "needs the network"}
    for table in listed.values():
        for name, why in table.items():
            assert name.startswith("tests/entrypoints/") and ".py" not in name, name
            assert why == why.strip() and not why.endswith(".") and len(why) > 4, name


DRAWN = "tests/entrypoints/openai/chat_completion/test_chat::test_structured_outputs_choice_chat"
"""Draws one of ten words twice at temperature 0.7; the demo draws different ones, as it asks, in four of five runs."""

DRAWS = 6
"""Further runs of ``DRAWN``, one of which has two different words."""


@pytest.mark.long
def test_every_function_passes_or_has_a_reason(folder: Path, tmp_path: Path) -> None:
    """Prints how many were skipped for which reason."""
    found = run_suite(folder, tmp_path, "tests/entrypoints")
    print(f"\n{found.passed} passed")
    for why, count in sorted(found.skipped.items()):
        print(f"{count:4} skipped: {why}")
    wrong = [line for line in found.wrong if not line.startswith(f"{DRAWN}:")]
    if len(wrong) < len(found.wrong):
        assert any(run_suite(folder, tmp_path, DRAWN.replace("::", ".py::")).passed for _ in range(DRAWS)), (
            "no draw has two different words"
        )
        found = found._replace(passed=found.passed + 1)
    assert not wrong, "\n".join([*wrong, found.output])
    assert found.passed >= LEAST, found.output


class SuiteResult(NamedTuple):
    """The number of vLLM's tests that passed, the skipped ones counted by reason, and a line for each that failed."""

    passed: int
    skipped: Counter[str]
    wrong: list[str]
    output: str


def run_suite(folder: Path, tmp_path: Path, selected: str) -> SuiteResult:
    """Runs the ``selected`` ones of vLLM's tests in their own environment."""
    report, suite = tmp_path / "report.xml", folder / "src"
    environ = os.environ | {
        "VLLM_SUITE": str(suite), "VLLM_SUITE_MODELS": str(folder / "models"), "TRENCADIS_PYTHON": sys.executable,
        "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        str(folder / "bin" / "python"), "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-q", "--tb=short",
        "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "vllm_suite.plugin", "--timeout", "120",
        "--continue-on-collection-errors", f"--junitxml={report}", selected,
    ]  # fmt: skip
    run = subprocess.run(command, cwd=suite, env=environ, capture_output=True, text=True, timeout=SECONDS)
    skipped, wrong, passed = Counter[str](), list[str](), 0
    for case in xml.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        found = next((child for child in case if child.tag in ("skipped", "failure", "error")), None)
        if found is None:
            passed += 1
        elif found.tag == "skipped":
            why = found.get("message", "")
            if why == "collection skipped":
                shown = (found.text or "").rpartition("Skipped: ")[2]
                why = "a whole file: " + shown.strip("'\")")
            skipped[why[:160]] += 1
        else:
            wrong.append(f"{name}: {found.get('message', '')[:160]}")
    return SuiteResult(passed, skipped, wrong, run.stdout[-3000:])
