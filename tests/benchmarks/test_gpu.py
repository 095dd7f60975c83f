"""One command for a card: what it does without one, how figures become verdicts, and that its parts run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import questions_of
from benchmarks.gpu import run
from benchmarks.gpu.claims import BY_ID, CLAIMS, kernel_values
from benchmarks.gpu.mixed import WAYS, Traffic
from benchmarks.harness import subprocesses as part_runs
from benchmarks.harness.claims import judge
from benchmarks.harness.reporting import RESULTS
from tests.traffic.bare_machine import ROOT, run_without_packages

SMOKE = """
import sys
from benchmarks.gpu import run
sys.argv = ["gpu", "--device", "cpu", "--smoke", "--only", "mixed"]
sys.exit(run.main())
"""


def test_without_a_card_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "card", lambda: "")
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert run.main() == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "needs an NVIDIA card" in said[0] and "--device twin --smoke" in said[0]


def test_every_claim_names_a_part() -> None:
    assert len(BY_ID) == len(CLAIMS)
    for claim in CLAIMS:
        assert set(claim.part.split(",")) <= set(run.PARTS)


def test_bars_are_floors_or_ceilings() -> None:
    found = judge(CLAIMS, {"demo_top1": 98.9, "tpot": 1.35, "captures": 1, "served": 1.0})
    assert {name: row["passed"] for name, row in found.items()} == {
        "demo_top1": False, "tpot": True, "captures": False, "served": True,
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
    assert kernel_values(rows) == {
        "decode16": 0.7, "decode1": 0.65, "prefill": 0.8, "windows": 2.5, "head": 2.5, "small": 0.9,
    }  # fmt: skip
    assert kernel_values([]) == {}
    failed = {"name": "prefill x 16384 tokens", "kernel": "attend_prefill", "error": "OutOfMemoryError: ..."}
    assert "prefill" not in kernel_values([*rows, failed]) and kernel_values([*rows, failed])["decode16"] == 0.7


def test_the_judge_knows_how_cases_are_named() -> None:
    names = {
        "attention_cases": (
            "decode {m.label} {rows} rows x {context}",
            "prefill {m.label} {tokens} tokens",
            " slots, ",
        ),
        "sampling_cases": ("head {setting}, {rows} x {vocab}",),
        "quantised_cases": ("quantised {label}, {rows} rows, {out} x {inputs}",),
        "small_cases": ("norm with residual {n} x {width}", "silu * up {n} x {width}", "patches {slots} x "),
    }
    for module, parts in names.items():
        source = (ROOT / "benchmarks" / "kernels" / f"{module}.py").read_text()
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


def test_forced_conversations_are_the_same_everywhere() -> None:
    a, b = questions_of(3), questions_of(3)
    assert [t[0]["content"][-1] for t in a] == [t[0]["content"][-1] for t in b]
    assert [len(t[0]["content"]) for t in a] == [1, 2, 1]


def test_every_part_can_be_imported_and_mixed_runs_on_a_bare_machine() -> None:
    """Neither the wire's codec nor a web framework nor transformers is asked for."""
    parts = "accuracy engine gpu.run gpu.probe gpu.mixed gpu.claims gpu.decode gpu.layers gpu.paces gpu.served"
    parts += " harness.compared_engines harness.checkpoints kernels.run speculation adapters"
    cases = "kernels.attention_cases kernels.small_cases kernels.sampling_cases kernels.layer_cases"
    names = [f"benchmarks.{name}" for name in (*parts.split(), *cases.split())]
    imported = "import " + ", ".join([*names, "tools.hardware", "tools.tune_kernels"])
    done = run_without_packages(imported + SMOKE, "transformers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran           graphs captured after warm-up" in done.stdout and "written to" in done.stdout
    found = json.loads((RESULTS / "gpu-mixed.json").read_text())
    assert found["requests"] == 12 and set(found["ended"]) <= {"stop", "length"} and found["launches"] > 12


@pytest.mark.long
def test_the_kernels_tests_can_be_collected_on_a_bare_machine() -> None:
    """One file that imports a package of the server's would keep all tests from running."""
    command = '["-q", "--collect-only", "-p", "no:cacheprovider", "tests/kernels", "tests/cuda/test_card.py"]'
    done = run_without_packages(f"import pytest\nsys.exit(pytest.main({command}))", "llguidance")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# The whole command


def _probe(**more: Any) -> dict[str, Any]:
    books = {"booked": 100 << 20, "used": 101 << 20, "total": 1 << 30}
    graphs = {"measured": 105, "predicted": 100, "captured": 3, "planned": 3}
    timed = {"encoder": [0.001] * 8, "tpot": 0.0013, "copy": 4.8e12}
    return {"graphs": graphs, "ledger": books, "answers": [1, 2], "forced": [], "failed": {}, **timed, **more}


_BATCHES = {"1": {"tokens": 24, "top1": 0, "gap": 0.5, "mean": 0.9, "heads": 0}}
_LAYERS = {"layers": {"3B, 1 rows": {}}, "bits": {"3B, 1 rows": "ab"}, "error": 0.6, "mean": 0.5, "elsewhere": 0,
           "moved": 0, "counters": 0}  # fmt: skip
_PACE = {"seconds": 0.003, "over": 1.4}

FIGURES: dict[str, dict[str, Any]] = {
    "decode-demo": {"top1": 0, "gap": 0.5, "mean": 0.9, "batches": _BATCHES},
    "decode-three": {"top1": 0, "gap": 0.4, "mean": 0.8, "batches": _BATCHES},
    "layers": _LAYERS, "layers-waiting": _LAYERS, "repeats": {"cases": {"decode": 0, "head": 0}, "failed": {}},
    "paces": {"tpot": {"1": _PACE, "16": _PACE}, "ttft": {"2048": _PACE}, "profiles": {}},
    "drafts": {"rows": [
        {"requests": n, "ratio": 2.5, "without": 10, "with": 25, "accepted": "3 of 4"} for n in (1, 128)
    ]},
    "adapters": {"base": 1.0, "one adapter": 1.0, "own adapters": 0.9},
    "adapters-loads": {"new": 20.0, "in host memory": 10.0, "in a slot": 5.0},
    "serve": {"ready": 9.0, "chunks": 7, "words": 5, "done": True},
    "three": _probe(), "three-eager": _probe(encoder=[0.002] * 8), "demo": _probe(),
    "three-bf16": _probe(tpot=0.002), "three-int8": _probe(tpot=0.001), "three-int4": _probe(tpot=0.0008),
    "three-accuracy": {"tokens": 100, "ours": 11, "theirs": 10, "noise": 0.1, "worst_gap": 0.05},
    "demo-accuracy": {"tokens": 1000, "ours": 5, "theirs": 6, "noise": 0.1, "worst_gap": 0.05},
    "mixed": {"requests": 10, "new_captures": 0, "jit": 0, "jit_names": {}, "launches": 9, "real": 1, "padded": 2,
              "misses": {}},
    "engine": {"cases": {"text-32": {"sides": {
        "ours": {"tokens_per_second": 90}, "theirs": {"tokens_per_second": 8},
    }}}},
    "kernels": {"machine": {"card": "NVIDIA Test"}, "cases": [
        _case("decode x 16 rows x 2048", "attend_decode", 0.8), _case("decode x 1 rows x 32768", "attend_decode", 0.8),
        _case("prefill x 4096 tokens", "attend_prefill", 0.5, 10.0, flash=9.0),
        _case("windows 4096 slots", "attend_windows", 0.5, 10.0, mask=25.0),
        _case("head no filter, 256 x 9", "head", 0.6), _case("norm with residual 8192 x 2", "norm", 0.9),
        _case("quantised int8, 1 rows, 9 x 9", "quantised", 0.8),
        _case("quantised int4, 1 rows, 9 x 9", "quantised", 0.8),
        _case("quantised fp8 by fp8, 4096 rows, 9 x 9", "quantised", 0.5, 10.0, cuBLAS=14.0),
        _case("quantised fp8 in blocks, 4096 rows, 9 x 9", "quantised", 0.5, 10.0, cuBLAS=14.0),
    ]},
}  # fmt: skip
"""What the parts write, and all of it good enough."""


class Card:
    """A machine with a card, as far as ``benchmarks.gpu`` sees one: its children write FIGURES and end.

    Args:
        dies: names of figures (by the file that they are written to) whose child fails before or after it wrote.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.figures, self.dies = dict(FIGURES), dict[str, BaseException | int]()
        self.out, self.docs = folder / "out", folder / "docs"
        patch.setattr(run, "card", lambda: "NVIDIA Test")
        for module in (run, part_runs):
            patch.setattr(module, "RESULTS", folder / "results")
        patch.setattr(run, "checkpoint", lambda name: Path("three"))
        for module in (run, part_runs):
            patch.setattr(module, "ended", self.child)
        patch.setattr(sys, "argv", ["gpu", "--out", str(self.out), "--docs", str(self.docs)])

    def child(self, command: list[str], left: float, variables: object = None) -> Any:
        if command[1] != "-P":  # the tuner and the tests
            return subprocess.CompletedProcess(command, 0, stderr="")
        module, *args = command[3].removeprefix("benchmarks."), *command[4:]
        at = {"gpu.probe": 1, "gpu.mixed": 1, "gpu.decode": 1, "gpu.paces": 1, "gpu.layers": 0, "gpu.served": 0,
              "accuracy": 2}.get(module)  # fmt: skip
        file = run.RESULTS / "engine.json" if module == "engine" else self.out / "kernels.json"  # type: ignore[attr-defined]
        if module == "kernels":
            file = Path(args[args.index("--out") + 1]) / ("repeats.json" if "--repeat" in args else "kernels.json")
        file = file if at is None else Path(args[at])
        file = Path(args[args.index("--json") + 1]) if "--json" in args else file
        name = file.stem.removeprefix("gpu-")
        if name in self.figures:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self.figures[name]))
        died = self.dies.get(name, 0)
        if isinstance(died, BaseException):
            raise died
        return subprocess.CompletedProcess(command, died, stderr="its last words")


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    return Card(monkeypatch, tmp_path)


def test_figures_of_a_card_reach_the_page(on_card: Card) -> None:
    pages = [(ROOT / "docs" / f"hardware.{kind}").read_text() for kind in ("json", "md")]
    assert run.main() == 0
    page = (on_card.docs / "hardware.md").read_text()
    assert page.count("holds on NVIDIA Test") == len(CLAIMS)
    assert "unproven |" not in page.partition("## What is claimed of a Gaudi")[0]
    assert "NVIDIA Test: 80%" in page, "the kernels' best shares"
    found = json.loads((on_card.out / "gpu.json").read_text())
    assert set(found["claims"]) == set(BY_ID) and not found["failures"] and found["machine"]["card"] == "NVIDIA Test"
    assert pages == [(ROOT / "docs" / f"hardware.{kind}").read_text() for kind in ("json", "md")]


def test_values_are_measured_at_once_and_before_speed(on_card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process waits for all others that compile: run one after another, none would end."""
    together, names = threading.Barrier(5, timeout=20), list[str]()

    def child(command: list[str], left: float, variables: Any = None) -> Any:
        if command[1] == "-P":
            part = command[3].removeprefix("benchmarks.")
            names.append(part)
            if len(names) <= 5:
                together.wait()
            if part == "gpu.layers":
                assert variables in ({run.DEPENDENT: "1"}, {run.DEPENDENT: "0"})
        return on_card.child(command, left, variables)

    for module in (run, part_runs):
        monkeypatch.setattr(module, "ended", child)
    assert run.main() == 0
    assert sorted(names[:5]) == ["gpu.decode", "gpu.decode", "gpu.layers", "gpu.layers", "kernels"]
    assert names[5] == "gpu.mixed"


def test_all_that_is_worth_keeping_is_a_few_files(on_card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters' tables are part of gpu.json, and the card's clocks stay as they are."""
    commands = list[list[str]]()

    def child(command: list[str], left: float, variables: Any = None) -> Any:
        if command[0].endswith("ncu"):
            commands.append(command)
            Path(command[command.index("--log-file") + 1]).write_text("ID,Metric\n0,1\n")
            return subprocess.CompletedProcess(command, 0, stderr="")
        return on_card.child(command, left, variables)

    for module in (run, part_runs):
        monkeypatch.setattr(module, "ended", child)
    monkeypatch.setattr(run.shutil, "which", lambda name: f"/opt/{name}" if name == "ncu" else None)  # type: ignore[attr-defined]
    arguments = ["gpu", "--out", str(on_card.out), "--docs", str(on_card.out)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert run.main() == 0
    assert sorted(p.name for p in on_card.out.iterdir()) == ["gpu.json", "hardware.json", "hardware.md", "kernels.json"]
    tables = json.loads((on_card.out / "gpu.json").read_text())["parts"]["counters"]
    assert tables == {case: ["ID,Metric", "0,1"] for case in run.PROFILED}
    assert all(c[c.index("--clock-control") + 1] == "none" for c in commands)


def test_two_halves_make_one_page(on_card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = list(sys.argv)
    first, second = list(run.PARTS)[:6], list(run.PARTS)[6:]
    for parts in (",".join(first), ",".join(second)):
        monkeypatch.setattr(sys, "argv", [*arguments, "--only", parts])
        assert run.main() == 0
    assert (on_card.docs / "hardware.md").read_text().count("holds on NVIDIA Test") == len(CLAIMS)


def test_a_part_that_fails_takes_nothing_with_it(on_card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    """Ended by a signal half-way, out of time, without a file, and by a mistake in the part itself."""
    half = {k: FIGURES["three"][k] for k in ("tpot", "copy")} | {"failed": {"encoder": "RuntimeError: CUDA error"}}
    on_card.figures["three"] = half
    on_card.dies = {"three": -6, "mixed": subprocess.TimeoutExpired("mixed", 1.0), "demo-accuracy": 1, "kernels": 1}
    del on_card.figures["demo-accuracy"]
    on_card.figures["engine"] = {"cases": {"text-32": {}}}
    assert run.main() == 1
    found = json.loads((on_card.out / "gpu.json").read_text())
    assert {"tpot", "captures", "serves_demo", "decode16", "small"} <= set(found["claims"])
    assert not {"three_rate", "replay", "demo_top1"} & set(found["claims"])
    said = "\n".join(found["failures"])
    for words in (
        "three: ended with -6: its last words", "three, encoder: RuntimeError: CUDA error", "mixed: stopped after",
        "demo-accuracy: ended with 1", "engine: KeyError", "kernels: ended with 1",
    ):  # fmt: skip
        assert words in said, words
    assert "PART FAILED  engine: KeyError" in capsys.readouterr().out
    page = (on_card.docs / "hardware.md").read_text()
    assert "holds on NVIDIA Test" in page and "unproven |" in page


def test_what_a_part_started_ends_with_it() -> None:
    """It would hold the card's memory beside the next part; what the part said is kept."""
    code = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.DEVNULL)
print(inner.pid, file=sys.stderr, flush=True)
time.sleep(60)
"""
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        part_runs.ended([sys.executable, "-c", code], 2.0)
    inner = int(str(caught.value.stderr))
    for _ in range(100):
        state = Path(f"/proc/{inner}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


@pytest.mark.long
def test_smoke() -> None:
    """Every part that needs no card, on the twin, in processes of their own."""
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", "--device", "twin", "--smoke"]
    environment = run.environment()  # type: ignore[attr-defined]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(Path(RESULTS / "gpu.json").read_text())
    assert not found["failures"] and {"serves_demo", "demo_top1", "three_rate", "replay", "captures"} <= set(
        found["claims"]
    )
    assert found["claims"]["replay"]["passed"] and found["claims"]["captures"]["passed"]
