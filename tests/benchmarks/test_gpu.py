"""One command for a card: what it does without one, how figures become verdicts, and that its parts run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.accuracy import talks_of
from benchmarks.claims import BY_ID, CLAIMS, judged, of_kernels
from benchmarks.common import RESULTS
from benchmarks.gpu_mixed import WAYS, Traffic
from tests.helpers.bare import ROOT, run_bare

SMOKE = """
import sys
from benchmarks import gpu
sys.argv = ["gpu", "--device", "cpu", "--smoke", "--only", "mixed"]
sys.exit(gpu.main())
"""


def test_without_a_card_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "card", lambda: "")
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "needs an NVIDIA card" in said[0] and "--device cpu --smoke" in said[0]


def test_every_claim_names_a_part() -> None:
    assert len(BY_ID) == len(CLAIMS)
    for claim in CLAIMS:
        assert set(claim.part.split(",")) <= set(gpu.PARTS)


def test_bars_are_floors_or_ceilings() -> None:
    found = judged({"demo_top1": 98.9, "tpot": 1.35, "captures": 1, "c32": 10.0})
    assert {name: row["passed"] for name, row in found.items()} == {
        "demo_top1": False, "tpot": True, "captures": False, "c32": True,
    }  # fmt: skip


def _case(name: str, kernel: str, share: float, us: float = 10.0, **baselines: Any) -> dict[str, Any]:
    return {"name": name, "kernel": kernel, "share": share, "microseconds": us, "baselines": baselines}


def test_kernels_are_judged_by_their_worst_case() -> None:
    label = "16/2x128 bfloat16"
    rows = [
        _case(f"decode {label} 16 rows x 2048", "attend_decode", 0.8),
        _case("decode 28/4x128 bfloat16 16 rows x 2048", "attend_decode", 0.7),
        _case(f"decode {label} 1 rows x 32768", "attend_decode", 0.65),
        _case(f"decode {label} 1 rows x 2048", "attend_decode", 0.1),
        _case(f"prefill {label} 512 tokens", "attend_prefill", 0.1, 10.0, flash=1.0),
        _case(f"prefill {label} 4096 tokens", "attend_prefill", 0.5, 10.0, flash=9.0, cudnn=8.0, other="none"),
        _case(f"prefill {label} 2048 tokens after 14336", "attend_prefill", 0.5),
        _case("windows 4096 slots, 2 images", "attend_windows", 0.5, 10.0, mask=25.0),
        _case("head greedy, 256 x 151936", "head_greedy", 0.8),
        _case("head no filter, 256 x 151936", "head", 0.4),
        _case("head greedy, 1 x 151936", "head_greedy", 0.01),
        _case("norm with residual 8192 x 2048", "norm", 0.9),
        _case("norm with residual 64 x 2048", "norm", 0.2),
    ]
    assert of_kernels(rows) == {
        "decode16": 0.7, "decode1": 0.65, "prefill": 0.8, "windows": 2.5, "head": 2.5, "small": 0.9,
    }  # fmt: skip
    assert of_kernels([]) == {}


def test_the_judge_knows_how_cases_are_named() -> None:
    names = {
        "attention_cases": (
            "decode {m.label} {rows} rows x {context}",
            "prefill {m.label} {tokens} tokens",
            " slots, ",
        ),
        "sampling_cases": ("head {setting}, {rows} x {vocab}",),
        "small_cases": ("norm with residual {n} x {width}", "silu * up {n} x {width}", "patches {slots} x "),
    }
    for module, parts in names.items():
        source = (ROOT / "benchmarks" / f"{module}.py").read_text()
        assert all(part in source for part in parts), module


def test_mixed_traffic_is_mixed_and_repeats() -> None:
    first, second = ([Traffic(1000, 300, 32).request(i) for i in range(1)] for _ in range(2))
    assert first == second
    traffic = Traffic(1000, 300, 32)
    requests = [traffic.request(i) for i in range(300)]
    assert len({len(r.tokens) for r in requests}) > 100 and {len(r.spans) for r in requests} == {0, 1, 2}
    assert {r.params.n for r in requests} == {1, 2} and sum(r.params.logprobs is not None for r in requests) > 10
    for r in requests:
        assert all(s.offset + s.length < len(r.tokens) for s in r.spans)
    assert len(WAYS) == 8


def test_forced_talks_are_the_same_everywhere() -> None:
    a, b = talks_of(3), talks_of(3)
    assert [t[0]["content"][-1] for t in a] == [t[0]["content"][-1] for t in b]
    assert [len(t[0]["content"]) for t in a] == [1, 2, 1]


def test_mixed_part_on_a_bare_machine() -> None:
    """Neither the wire's codec nor a web framework nor transformers is asked for."""
    done = run_bare(SMOKE, "transformers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran           graphs captured after warm-up" in done.stdout and "written to" in done.stdout
    found = json.loads((RESULTS / "gpu-mixed.json").read_text())
    assert found["requests"] == 12 and set(found["ended"]) <= {"stop", "length"} and found["launches"] > 12


@pytest.mark.long
def test_smoke() -> None:
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", "--device", "cpu", "--smoke"]
    environment = gpu.environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(Path(RESULTS / "gpu.json").read_text())
    assert not found["failures"] and {"serves", "demo_top1", "three_rate", "replay", "captures"} <= set(found["claims"])
    assert found["claims"]["replay"]["passed"] and found["claims"]["captures"]["passed"]
