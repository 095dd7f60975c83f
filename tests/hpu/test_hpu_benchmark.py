"""One command for a Gaudi: what it does without one, what its figures catch, its parts on an emulated card."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.claims import judge
from benchmarks.hpu import device_probe, kernel_times, ranks_probe, run
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


@pytest.mark.parametrize("ran", ["functional", "eager"])
def test_a_time_is_entered_under_the_form_that_ran(ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start takes the eager form where the other does not work."""

    class Rank:
        exitcode = 0

        def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
            Path(args[3]).write_text(json.dumps([7.5, ran]))

        def start(self) -> None: ...

        def join(self) -> None: ...

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Process=Rank))
    assert ranks_probe.all_reduce_us(5, ran) == 7.5
    other = {"functional": "eager", "eager": "functional"}[ran]
    with pytest.raises(RuntimeError, match=f"ran in the {ran} form"):
        ranks_probe.all_reduce_us(5, other)


@pytest.mark.parametrize("lazy", [True, False])
def test_what_a_card_is_asked_of_kernels(hpu: Any, lazy: bool) -> None:
    """The emulated card multiplies bfloat16 into bfloat16 alone."""
    card = hpu(dtype=torch.bfloat16, block_size=128, max_rows=64, lazy=lazy)
    assert kernel_times.found_at_opening(card) == {"pinned": 1, "product": 0}
    assert kernel_times.known_lack_of_memory(card) == {"oom_text": 1}
    found = kernel_times.attention_times(card, 64)
    assert set(found) == {"attend_ms", "attend_parts"} and min(found.values()) > 0
    assert kernel_times.expert_time(card, 4, 32, 16)["experts_ms"] > 0
    assert not card.hpu_ops.kernels.decode_parts


@pytest.mark.long
def test_every_part_runs_on_an_emulated_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two and a half minutes: seven engines start. Lazy mode, which dispatches no regions."""
    monkeypatch.setattr(sys, "argv", ["hpu", "--smoke", "--out", str(tmp_path)])
    begun = time.monotonic()
    assert run.main() == 0
    took = time.monotonic() - begun
    found = json.loads((tmp_path / "hpu.json").read_text())
    print(f"{took:.0f} s")
    assert not found["failures"] and set(found["claims"]) == set(BY_ID) - {"dispatch_us"}
    assert found["claims"]["demo_tokens"]["value"] == 0 and found["claims"]["ranks_tokens"]["value"] == 0
    assert took < 150


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
