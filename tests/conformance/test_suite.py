"""The suite over each device that passes it, as a user runs it and as a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trencadis.assets import demo_path
from trencadis.backends.conformance import check_suite
from trencadis.backends.conformance.backend_under_test import CheckTarget, make_target
from trencadis.backends.conformance.check_result import CheckFailed, Report, Result, line
from trencadis.core.device.backend import Backend, BackendConfig
from trencadis.core.errors import StartupError
from trencadis.server.cli import check_backend_and_compare_model

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = Path(demo_path())


def fine(report: Report, least: int = 15) -> None:
    """Nothing failed, and something was checked."""
    assert not report.failures(), "\n".join(line(r) for r in report.results)
    assert report.count("pass") >= least


CPU = {
    "": ("op.", "padding", "refill", "determinism", "memory", "tokens"),
    "padded": ("padding", "refill", "release"),
}
CARD = ("op.", "memory", "rollback")


@pytest.mark.parametrize("policy", CPU)
def test_cpu(policy: str) -> None:
    report = check_suite.run(make_target("cpu", DEMO, policy=policy, quick=True), CPU[policy])
    fine(report, least=len(CPU[policy]))
    assert "patches" in report.inherited and "attend" not in report.inherited


def test_emulated_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own hooks among it; tests/hpu/test_poison.py takes every bucket through padding and replay, test_serving.py
    holds tokens to the CPU's, tests/graphs/test_emulated.py runs out of memory in captures; the long suite has all."""
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    report = check_suite.run(make_target("hpu", DEMO, quick=True), CARD)
    fine(report)
    assert report.count("skip") == 0, "the emulated card offers every hook"


def test_twin_of_a_card() -> None:
    """The CUDA backend's programs and graphs over the CPU twin of its runtime; the long suite has the rest."""
    requested = "op.attend", "op.experts", "op.sample", "shapes", "tokens"
    report = check_suite.run(make_target("cuda", DEMO, policy="twin", quick=True), requested)
    fine(report, least=6)


@pytest.mark.long
@pytest.mark.parametrize(("name", "policy"), [("cpu", ""), ("hpu", ""), ("cuda", "twin")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_suite(name: str, policy: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_HPU_EMULATOR", "1")
    report = check_suite.run(make_target(name, DEMO, dtype=dtype, policy=policy), tell=lambda r: print(line(r)))
    print(report.summary())
    fine(report)


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["nosuch"], "unknown device 'nosuch'; available: cpu"),
        ([], "needs the name of one device: cpu"),
        (["cpu", "hpu"], "one device"),
        (["cpu", "--often"], "does not know --often"),
        (["cpu", "--dtype"], "--dtype needs a value"),
        (["cpu", "--only", "op.linear,nothing"], "no check has a name that begins with it"),
        (["cpu", "--policy", "none"], "no policy 'none'"),
    ):
        with pytest.raises(StartupError, match=says):
            check_backend_and_compare_model.main(words)
    assert check_backend_and_compare_model.main(["--help"]) == 0
    assert "--quick" in capsys.readouterr().out


def test_exit_code_and_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(of: CheckTarget) -> str:
        """Fails."""
        raise CheckFailed("as it must")

    assert check_backend_and_compare_model.main(["cpu", "--quick", "--only", "op.silu_mul,op.reset", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and [r["name"] for r in report["results"]] == ["op.silu_mul", "op.reset"]
    served = report["served"]
    assert (report["dtype"], served["dtype"]) == ("float32", "bfloat16"), "the type that serve takes is checked, too"
    assert served["passed"] and [r["name"] for r in served["results"]] == ["op.silu_mul", "op.reset"]
    command = ["cpu", "--quick", "--only", "op.reset", "--json", "--dtype"]
    for asked, dtype in (("serve", "bfloat16"), ("float32", "float32")):
        assert check_backend_and_compare_model.main([*command, asked]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["dtype"] == dtype and "served" not in report
    monkeypatch.setitem(check_suite.CHECKS, "op.silu_mul", broken)
    assert check_backend_and_compare_model.main(["cpu", "--quick", "--only", "op.silu_mul"]) == 1
    assert "fail  op.silu_mul" in capsys.readouterr().out


def test_a_head_without_logits_has_the_shapes_of_its_bucket() -> None:
    """In bfloat16 the CPU's greedy head takes the best ids as they are computed."""
    target = make_target("cpu", DEMO, dtype="serve", quick=True)
    assert target.dtype is torch.bfloat16
    found = check_suite.run_check("shapes", check_suite.CHECKS["shapes"], target)
    assert isinstance(found, Result) and found.status == "pass", found


def test_an_error_of_the_backend_is_a_failure_and_not_an_end() -> None:
    def make(cfg: BackendConfig) -> Backend:
        raise RuntimeError("no such thing")

    found = check_suite.run_check("padding", check_suite.CHECKS["padding"], CheckTarget("x", make, DEMO))
    assert isinstance(found, Result) and found.status == "fail" and "no such thing" in found.reason
