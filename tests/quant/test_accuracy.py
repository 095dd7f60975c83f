"""What quantised weights and caches cost in answers: the demo's held-out questions, asked of the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import held_out_accuracy
from benchmarks.harness.held_out_accuracy import WAYS, Answered, Cost, answered, cost
from benchmarks.harness.reporting import environment
from trencadis.core.errors import StartupError
from trencadis.server.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@cache
def reference(count: int) -> Answered:
    return answered(count)


def measured(name: str, count: int, found: Answered) -> Cost:
    """What a form costs, printed."""
    made = cost(found, reference(count))
    print(f"{name}: {count} questions, {made.exact:.2f} % exact, lost {made.lost:+.2f}, agree {made.agreed:.2f} %")
    return made


def test_few_answers_are_lost() -> None:
    """A sample of the long test; its bars are wider, since one question is two points."""
    made = measured("int8", 48, answered(48, **WAYS["int8"][0]))
    assert made.lost <= 4.2 and made.agreed >= 98.5


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_few_answers_are_lost_long(way: str) -> None:
    options, bar = WAYS[way]
    count = int(os.environ.get("TRENCADIS_TEST_PROMPTS", "2000"))
    try:
        found = answered(count, **options)
    except StartupError as error:
        if "not supported yet" not in str(error):
            raise
        pytest.skip(str(error))
    made = measured(way, count, found)
    assert made.lost <= bar.lost and made.agreed >= bar.agreed


@pytest.mark.long
@pytest.mark.parametrize("lazy", ["1", "0"])
def test_a_gaudis_products_lose_no_answers_long(lazy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default on hpu: keys and values are multiplied in bfloat16, and scores rounded to it before they widen."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    count = int(os.environ.get("TRENCADIS_TEST_PROMPTS", "2000"))
    made = measured(f"hpu, PT_HPU_LAZY_MODE={lazy}", count, answered(count, device="hpu", warmup="skip"))
    assert made.lost <= 0.2


@pytest.mark.long
@pytest.mark.parametrize("to", ["int8", "fp8", "int4"])
def test_few_answers_are_lost_in_files_that_quantize_writes_long(to: str, tmp_path: Path) -> None:
    """Linear layers in fewer bits, the head in 16: at most what the same bits cost as weights load."""
    from trencadis.assets import demo_path

    assert main(["quantize", str(demo_path()), str(tmp_path / "out"), "--to", to]) == 0
    count, bar = int(os.environ.get("TRENCADIS_TEST_PROMPTS", "2000")), WAYS[to][1]
    made = measured(f"{to} file", count, answered(count, str(tmp_path / "out")))
    assert made.lost <= bar.lost and made.agreed >= bar.agreed


def test_a_run_that_was_stopped_goes_on_from_what_it_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forms that answered are not asked again, unless the code or the number of questions is another."""
    requested = list[str]()

    def ask(count: int, **options: Any) -> Answered:
        requested.append(options.get("quantization", "16 bits"))
        if len(requested) == 3:
            raise KeyboardInterrupt
        return Answered([True] * count, [[1, 2]] * count)

    monkeypatch.setattr(held_out_accuracy, "answered", ask)
    kept = tmp_path / "kept.json"
    with pytest.raises(KeyboardInterrupt):
        held_out_accuracy.report(4, ["int8", "fp8"], kept)
    assert "100.00" in held_out_accuracy.report(4, ["int8", "fp8"], kept)
    assert requested == ["16 bits", "int8", "fp8", "fp8"]
    held_out_accuracy.report(5, ["int8"], kept)
    monkeypatch.setattr(held_out_accuracy, "sources", lambda: "other")
    held_out_accuracy.report(5, ["int8"], kept)
    assert requested[4:] == ["16 bits", "int8"] * 2


@pytest.mark.long
@pytest.mark.parametrize("command", ["--smoke --threads 1", "--questions 8 --ways int8,fp8_KV"])
def test_the_benchmarks_run(command: str) -> None:
    words = [word.replace("_", " ") for word in command.split()]
    words = [sys.executable, "-P", "-m", "benchmarks.quantised", *words]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "int4 / bfloat16" in done.stdout or "int8" in done.stdout
    assert ("llama.cpp: unproven" in done.stdout) == ("--smoke" in words)
