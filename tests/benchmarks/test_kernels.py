"""``benchmarks.kernels`` without a card: what is captured, what is timed, and that a failing case costs only itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.claims import kernel_values
from benchmarks.kernels import attention_cases, case
from benchmarks.kernels import run as kernels
from benchmarks.kernels.case import Case
from tests.fakes import cuda as fake_cuda
from tests.oracles import interpreter

CPU = torch.device("cpu")


class Clock:
    """Events of a device on which all work takes 10 us, and each replay or call recorded between them 2 us more."""

    work = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Clock.work

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Clock) -> float:
        return (10 + 2 * (end.at - self.at)) / 1e3


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> kernels.Timer:
    fake_cuda.install(monkeypatch)
    strict = [False]
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: strict.__setitem__(0, mode == "error"))
    monkeypatch.setattr(kernels, "FLUSH", 1 << 12)
    monkeypatch.setattr(fake_cuda.Graph, "replay", lambda self: setattr(Clock, "work", Clock.work + 1))
    made = kernels.Timer(CPU)
    made.strict = strict  # type: ignore[attr-defined]
    return made


def test_the_start_of_a_graph_is_no_part_of_a_launch(timer: kernels.Timer) -> None:
    assert timer.idle == pytest.approx(12e-6)
    assert timer(lambda: None) == pytest.approx(12e-6)
    assert timer.net(lambda: None) == pytest.approx(6e-6), "at least half of what was measured"


def test_what_waits_is_not_captured(timer: kernels.Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of it would leave torch's allocator broken for all that come after."""
    begun: list[Any] = []
    monkeypatch.setattr(fake_cuda.Graph, "capture_begin", lambda *args, **kwargs: begun.append(args))
    calls: list[int] = []

    def waits() -> None:
        calls.append(1)
        if timer.strict[0]:  # type: ignore[attr-defined]
            raise RuntimeError("called a synchronizing CUDA operation")

    timer(waits)
    assert not begun and len(calls) == 4 + kernels.REPEATS and timer.strict == [False]  # type: ignore[attr-defined]


def test_what_cannot_be_captured_is_called(timer: kernels.Timer) -> None:
    calls: list[int] = []

    def fussy() -> None:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("operation not permitted when stream is capturing")

    timer(fussy)
    assert len(calls) == 5 + kernels.REPEATS


def test_a_case_that_fails_costs_only_itself(
    timer: kernels.Timer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def case(name: str, kernel: str, run: Any = lambda: None, **more: Any) -> Case:
        return Case(name, kernel, run, bytes=1000, flops=0, bound="bytes", **more)

    def out_of_memory() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30 GiB")

    def cases(device: torch.device) -> Iterator[Case]:
        yield case("decode x 16 rows x 2048", "attend_decode", baselines={"sdpa": lambda: None, "none": out_of_memory})
        yield case("head no filter, 256 x 9", "head", check=out_of_memory)
        yield case("decode x 1 rows x 32768", "attend_decode", check=lambda: 0.01)
        raise ValueError("the next cannot be made")

    monkeypatch.setattr(kernels, "Timer", lambda device: timer)
    monkeypatch.setattr(kernels, "modules", lambda *only: [SimpleNamespace(__name__="some_cases", cases=cases)] * 2)
    monkeypatch.setattr(kernels, "machine", lambda: {"card": "NVIDIA Test"})
    monkeypatch.setattr(kernels, "ceilings", lambda timer: {"copy": 1.0, "read": 1.0, "flops": 1.0})
    assert kernels.measure("", tmp_path) == 1
    found = json.loads((tmp_path / "kernels.json").read_text())["cases"]
    assert [("error" in r, r["kernel"]) for r in found] == [
        (False, "attend_decode"), (True, "head"), (False, "attend_decode"), (True, ""),
    ] * 2  # fmt: skip
    assert found[0]["baselines"]["none"].startswith("OutOfMemoryError") and found[0]["baselines"]["sdpa"] > 0
    assert set(kernel_values(found)) == {"decode16", "decode1"}
    assert (tmp_path / "kernels.png").is_file() and "FAILED  OutOfMemoryError" in capsys.readouterr().out


def test_an_older_interpreter_reads_scalars_as_numpy_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 converts an array of one value by ``int``, which numpy refuses from 2.4 on."""
    from triton.runtime import interpreter as triton_interpreter

    newer = triton_interpreter._patch_lang_tensor

    def older(tensor: Any, scope: Any) -> None:
        newer(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))

    monkeypatch.setattr(triton_interpreter, "_patch_lang_tensor", older)
    decode = next(c for c in attention_cases.cases(CPU, small=True) if " 1 rows" in c.name and c.check is not None)
    assert decode.check is not None
    with interpreter.uncorrected():
        with pytest.raises(Exception, match="0-dimensional"):
            decode.check()
        case.use_interpreter(True)
        assert decode.check() < kernels.AWAY
