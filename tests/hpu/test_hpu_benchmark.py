"""One command for a Gaudi: what it does without one, what its figures catch, its parts on an emulated card."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.claims import judge
from benchmarks.hpu import device_probe, run
from benchmarks.hpu.claims import BY_ID, CLAIMS
from tests.stubs import gaudi_container
from tools.hardware import claims
from trencadis.core.device.backend import BackendConfig, HeadTensorsOut
from trencadis.core.step_output import HeadOutput


def test_without_a_card_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "emulated", lambda: True)
    monkeypatch.setattr(sys, "argv", ["hpu"])
    assert run.main() == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "needs a Gaudi" in said[0] and "--smoke" in said[0]


def test_every_claim_is_a_row_with_the_command_of_its_part() -> None:
    assert len(BY_ID) == len(CLAIMS) and {c.part for c in CLAIMS} == set(run.PARTS)
    rows = claims(CLAIMS, {})[2:-1]
    assert len(rows) == len(CLAIMS) and all("unproven" in row and "benchmarks.hpu --only" in row for row in rows)


def test_forced_choices_are_compared_one_by_one() -> None:
    made = run.HpuRun("hpu", False, 0.0)
    run.top1(made, [{"picks": [1, 2]}, {"picks": [3, 4]}], [{"picks": [1, 2]}, {"picks": [3, 5]}])
    assert made.values["demo_top1"] == 75 and not judge(CLAIMS, made.values)["demo_top1"]["passed"]


class ReadsEarly:
    """A pending fetch that does not wait: it holds what the memory held before."""

    def __init__(self, out: HeadTensorsOut, rows: int) -> None:
        self._found = np.full(rows, 123, np.int32)

    def done(self) -> bool:
        return True

    def result(self) -> HeadOutput:
        return HeadOutput(self._found, None, None, None, None)


def backend(hpu: Any) -> Any:
    config = BackendConfig(torch.float32, device_probe.BLOCK, max_rows=device_probe.ROWS, vocab_size=1 << 20)
    return hpu(**{name: getattr(config, name) for name in ("dtype", "block_size", "max_rows", "vocab_size")})


def test_the_device_probe_counts_wrong_reads(hpu: Any) -> None:
    card = backend(hpu)
    assert device_probe.wrong_reads(card, 12) == {"fetches": 0, "fills": 0}
    card.fetch = ReadsEarly
    assert device_probe.wrong_reads(card, 12)["fetches"] == 12


def test_the_device_probe_counts_late_fills(hpu: Any) -> None:
    """A fill that sends the next launch's arrays is told from a bad read."""
    card = backend(hpu)
    fill = card.fill
    card.fill = lambda program, inputs: fill(program, device_probe.decode_inputs(2))
    found = device_probe.wrong_reads(card, 3)
    assert found["fills"] + found["fetches"] == 2 and found["fills"] >= 1


def test_the_device_probe_measures_copies_and_releases(hpu: Any) -> None:
    times = device_probe.copy_times(backend(hpu), 20)
    assert times["fill_us"] > 0 and times["fetch_us"] > 0
    assert 0 <= device_probe.returned(backend(hpu))["released"] <= 1
    assert device_probe.store_ratio(backend(hpu), device_probe.SMALL)["in_place"] > 0


@pytest.mark.long
def test_every_part_runs_on_an_emulated_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two minutes."""
    monkeypatch.setattr(sys, "argv", ["hpu", "--smoke", "--out", str(tmp_path)])
    begun = time.monotonic()
    assert run.main() == 0
    took = time.monotonic() - begun
    found = json.loads((tmp_path / "hpu.json").read_text())
    print(f"{took:.0f} s")
    assert not found["failures"] and set(found["claims"]) == set(BY_ID)
    assert found["claims"]["demo_tokens"]["value"] == 0 and found["claims"]["ranks_tokens"]["value"] == 0
    assert took < 120


@pytest.mark.long
@pytest.mark.parametrize("torch_version", ["2.9.0+hpu_1.23.1-25.git8598e6d", "2.13.0+cpu"])
def test_the_parts_for_one_card_run_over_the_stub(torch_version: str, tmp_path: Path) -> None:
    """In a container of the fake kind: lazy mode of 1.23, compile mode of 1.24.2."""
    container = gaudi_container.make(tmp_path / "c", torch_version, gaudi_container.PUBLISHED[torch_version])
    env = container.variables(HABANA_STUB_DEVICE="cpu", VLLM_MULTIMODAL_BUCKETS="256")
    line = [
        sys.executable,
        "-P",
        "-m",
        "benchmarks.hpu",
        "--smoke",
        "--out",
        str(tmp_path),
        "--only",
        "device,demo,three",
    ]
    done = subprocess.run(line, env=env, cwd=gaudi_container.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "hpu.json").read_text())
    assert found["claims"]["demo_tokens"]["value"] == 0 and found["machine"]["card"] == "GAUDI2"
