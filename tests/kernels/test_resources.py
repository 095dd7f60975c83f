"""Kernels compile ahead of time and stay within registers and shared memory; in a process that does not interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.kernel_resources import Report, faults, markdown

ROOT = Path(__file__).resolve().parents[2]


def tool(file: Path, *args: str) -> list[Report]:
    command = [sys.executable, str(ROOT / "tools" / "kernel_resources.py"), "--json", str(file), *args]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [Report(**r) for r in json.loads(file.read_text())]


def test_a_sample_compiles(tmp_path: Path) -> None:
    found = tool(
        tmp_path / "r.json", "--arch", "86", "--kernels", "attend_decode", "--match", "bfloat16 head 64 block 16"
    )
    assert [r.kernel for r in found] == ["decode_kernel", "combine_kernel"]
    for r in found:
        assert 16 <= r.registers < 256 and r.stack == 0 and 0 < r.shared <= 99 << 10 and 0 < r.occupancy <= 1


@pytest.mark.long
def test_everything_compiles(tmp_path: Path) -> None:
    """Every entry of every table, every architecture; ends with 1 where 16-bit attention spills."""
    found = tool(tmp_path / "r.json", "--arch", "80", "86", "89", "90", "--jobs", "2")
    spilling = sorted({f"{r.kernel} {r.case} sm_{r.arch}: {r.stack}" for r in found if r.stack})
    print(f"\n{len(found)} compilations; float32 kernels that spill: {spilling or 'none'}")


def test_faults_are_named() -> None:
    good = Report("bfloat16 head 64", "decode_kernel", 86, 128, 0, 50 << 10, 4)
    assert not faults([good])
    assert good.occupancy == 4 / 48
    for changed, said in (
        ({"stack": 8}, "spills 8 bytes"),
        ({"shared": 100 << 10}, "shared memory of 101376"),
        ({"error": "no"}, "no"),
    ):
        assert said in faults([Report(**{**vars(good), **changed})])[0]
    assert not faults([Report(**{**vars(good), "case": "float32 head 64", "stack": 8})])
    assert "**stack 8**" in markdown([Report(**{**vars(good), "stack": 8})], "3")
