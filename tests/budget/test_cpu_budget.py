"""The plug-in that adds up the CPU seconds of the parts, over a run of four small tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.plugins.cpu_budget import PIECE_SECONDS, VARIABLE, CpuBudget, Part, part_of, read_parts, time_piece

ROOT = Path(__file__).resolve().parents[2]
INI = """
[pytest]
addopts = --import-mode=importlib -m 'not long'
testpaths = checks
cpu_budget = budget.toml
cpu_budget_markers = not long
markers = long: slow
"""
CONFTEST = 'pytest_plugins = ["tests.plugins.cpu_budget"]'
SPIN = """
import subprocess, sys, time, pytest
SPIN = "import time; end = time.process_time() + 0.2\\nwhile time.process_time() < end: pass"
"""
ALONE = SPIN + "def test_in_this_process(): exec(SPIN, {'time': time})\ndef test_idle(): time.sleep(0.3)"
CHILD = SPIN + "def test_in_a_child(): subprocess.run([sys.executable, '-c', SPIN], check=True)\n"
MARKED = '@pytest.mark.part("marked")\ndef test_marked(): pass\n@pytest.mark.long\ndef test_long(): pass\n'


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose ``slow`` part takes 0.2 s in a child and may take next to nothing."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makefile(".ini", pytest=INI)
    budget = '[base]\nseconds = 100\n[slow]\nseconds = 0.01\nfiles = ["checks/test_c*.py"]\n[marked]\nseconds = 5\n'
    pytester.makefile(".toml", budget=budget)
    checks = pytester.mkdir("checks")
    (checks / "conftest.py").write_text(CONFTEST)
    (checks / "test_alone.py").write_text(ALONE)
    (checks / "test_child.py").write_text(CHILD + MARKED)
    return pytester


def figures(result: pytest.RunResult) -> dict[str, float]:
    """Seconds of each part that a run printed."""
    lines = [re.match(r"([\w-]+): ([0-9.]+) s of CPU", line) for line in result.outlines]
    return {m[1]: float(m[2]) for m in lines if m}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_part_above_its_budget_fails_a_whole_run(run: pytest.Pytester, workers: str) -> None:
    """Children count, sleep does not, and workers report to the process that started them."""
    result = run.runpytest_subprocess(
        "-p", "no:cacheprovider", "-p", "xdist.plugin", "-n", workers, "--dist", "loadfile", "--cpu-json=cpu.json"
    )
    result.assert_outcomes(passed=4, deselected=1 if workers == "0" else 0)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    seconds = figures(result)
    assert list(seconds) == ["base", "slow", "marked"]
    assert seconds["slow"] >= 0.2 and seconds["base"] >= 0.2 and seconds["marked"] < 0.2
    result.stdout.fnmatch_lines(["slow: * s of CPU, budget 0 s: ABOVE ITS BUDGET", "marked: *: ok"])
    written = json.loads((run.path / "cpu.json").read_text())
    assert written["files"]["slow"]["checks/test_child.py"] == pytest.approx(seconds["slow"], abs=0.06)
    assert len(written["tests"]) == 4 and written["tests"]["checks/test_child.py::test_in_a_child"] >= 0.2
    (line,) = [line for line in result.outlines if line.startswith("memory of each process that ran tests: ")]
    sizes = re.findall(r"\d+\.\d\d", line)
    assert len(sizes) == max(int(workers), 1) and all(0 < float(size) < 1 for size in sizes)
    assert set(written["memory"]) == {"checks/test_alone.py", "checks/test_child.py"}


def test_a_variable_only_warns_and_a_part_of_the_tests_is_not_judged(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = run.runpytest_subprocess("-p", "no:cacheprovider", "--cpu-files", "3", "checks")
    assert partial.ret == pytest.ExitCode.OK and figures(partial) == {}
    partial.stdout.fnmatch_lines(["*0.* slow *checks/test_child.py"])
    monkeypatch.setenv(VARIABLE, "warn")
    whole = run.runpytest_subprocess("-p", "no:cacheprovider")
    assert whole.ret == pytest.ExitCode.OK and figures(whole)["slow"] >= 0.2
    whole.stdout.fnmatch_lines(["slow: *ABOVE ITS BUDGET"])


def test_budgets_grow_with_the_cpu_seconds_of_the_same_work(pytestconfig: pytest.Config) -> None:
    budget = CpuBudget(pytestconfig, [Part("base", 10.0, ()), Part("other", 10.0, ("x/*",))])
    budget.spent["base", "a.py"], budget.spent["other", "x/a.py"] = 25.0, 15.0
    assert [part.name for part in budget.above(2.0)] == ["base"]
    budget.pieces = [PIECE_SECONDS * times for times in (0.1, 1.5, 9.0)]
    assert budget.slowness == pytest.approx(1.5) and budget.above(2.0) == [] and len(budget.above()) == 1
    budget.pieces = [PIECE_SECONDS / 2]
    assert budget.slowness == 1.0, "a fast machine has the same budgets"
    assert 0.2 * PIECE_SECONDS < time_piece() < 20 * PIECE_SECONDS


def test_the_files_of_the_parts_are_there() -> None:
    parts = read_parts(ROOT / "tests" / "budget.toml")
    assert parts[0].name == "base" and not parts[0].files
    assert [p for part in parts for p in part.files if not list(ROOT.glob(p))] == []


def test_a_mark_that_names_no_part_is_an_error() -> None:
    parts = [Part("base", 1, ()), Part("a", 1, ("x/*",))]
    assert [part_of(f, m, parts) for f, m in (("x/y.py", None), ("x/y.py", "base"), ("z.py", None))] == [
        "a", "base", "base",
    ]  # fmt: skip
    with pytest.raises(pytest.UsageError, match="part 'b' is not in the budget file; known are base, a"):
        part_of("x/y.py", "b", parts)
