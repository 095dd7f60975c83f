"""Parts that Dynamo cannot trace as one graph: one line that names part and line, then graph breaks if allowed."""

from __future__ import annotations

import faulthandler
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.injected_faults import GRAPH_FAILED, LOWERING_FAILED
from trencadis.backends.hpu.habana_bridge import fused_attention
from trencadis.backends.hpu.hpu_settings import HpuSettings, settings
from trencadis.backends.hpu.launches.region_compiler import RegionCompiler, Regions
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.errors import StartupError

pytestmark = pytest.mark.part("gaudi")


class Untraceable:
    """A part that calls a builtin of a C library, as the plug-in's wrappers do."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        faulthandler.is_enabled()  # the line that is named
        return y + 1


def line_number() -> int:
    with open(__file__) as lines:
        return next(i for i, line in enumerate(lines, 1) if "# the line that is named" in line)


def test_a_part_that_cannot_be_traced_is_one_line(hpu: Any) -> None:
    backend = hpu(lazy=False)
    with pytest.raises(StartupError) as found:
        backend.hpu_ops.regions(Untraceable().forward, torch.ones(3).to(DEVICE))
    text = str(found.value)
    assert "Untraceable.forward" in text and f"test_graph_breaks.py:{line_number()}" in text and "\n" not in text
    assert backend.graph_breaks() == 0


def test_a_part_that_cannot_be_traced_is_compiled_with_breaks(hpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    backend = hpu(lazy=False, switches=HpuSettings(graph_breaks=True))
    part = Untraceable()
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        for number in (1.0, 2.0, 3.0):
            out = backend.hpu_ops.regions(part.forward, torch.full((3,), number).to(DEVICE))
            assert out.cpu().tolist() == [2 * number + 1] * 3
    (record,) = caplog.records
    assert f"test_graph_breaks.py:{line_number()}" in record.getMessage() and backend.graph_breaks() == 1


class Doubled:
    """A part that compiles everywhere but where the card's compiler is made to fail."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("fault", ["fail", "late"])
@pytest.mark.parametrize("made", [Doubled, Untraceable])
def test_a_part_that_the_graph_compiler_refuses_runs_uncompiled(
    made: Any, fault: str, hpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error comes at once, or from a thread, by a later call; also where the part was compiled with breaks."""
    refused = ",".join(f"{fault}@graph:{n}" for n in (1, 2))
    backend = hpu(lazy=False, switches=HpuSettings(graph_breaks=True), faults=refused)
    part = made()
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        for number in (1.0, 2.0, 3.0):
            out = backend.hpu_ops.regions(part.forward, torch.full((3,), number).to(DEVICE))
            assert out.cpu().tolist() == [2 * number + (made is Untraceable)] * 3
    line = caplog.records[-1].getMessage()
    assert f"{made.__name__}.forward" in line and "Graph compile failed" in line and "operation by operation" in line
    assert len(caplog.records) == (2 if made is Untraceable else 1) and backend.graph_breaks() == 1


def test_a_refused_part_is_one_line_where_one_graph_is_asked_for(hpu: Any) -> None:
    backend = hpu(lazy=False, faults="late@graph:1")
    with pytest.raises(StartupError, match=r"compiler refuses Doubled\.forward .*Graph compile failed") as found:
        backend.hpu_ops.regions(Doubled().forward, torch.ones(3).to(DEVICE))
    assert "\n" not in str(found.value) and backend.graph_breaks() == 0


def test_a_refusal_in_compile_only_mode_is_raised_and_the_part_compiled_later(hpu: Any) -> None:
    """Compile-only mode: the graph compiler was seen to refuse image launches in this mode and in no other."""
    backend = hpu(lazy=False, block_size=4, switches=HpuSettings(graph_breaks=True), faults="fail@graph:1")
    program = backend.program(Bucket(Stage.DECODE, (2, 2)), lambda x: x)
    part, x = Doubled(), torch.ones(3).to(DEVICE)
    with program.compile_mode(), pytest.raises(RuntimeError, match="Graph compile failed"):
        backend.hpu_ops.regions(part.forward, x)
    backend.card.faults.failing.clear()
    assert backend.hpu_ops.regions(part.forward, x).cpu().tolist() == [2.0] * 3 and backend.graph_breaks() == 0


@pytest.mark.parametrize("late", [True, False])
def test_a_launch_that_cannot_be_compiled_ends_a_start_in_one_line(hpu: Any, late: bool) -> None:
    """In lazy mode, where no part can be left uncompiled."""
    backend = hpu(block_size=4)
    text = LOWERING_FAILED if late else GRAPH_FAILED

    def body(x: Any) -> Any:
        raise RuntimeError(text)

    program = backend.program(Bucket(Stage.DECODE, (2, 2)), body)
    with pytest.raises(StartupError, match=r"compiler refuses decode\[2x2\] .*Graph compile failed") as found:
        program.rehearse()
    assert "\n" not in str(found.value) and "PT_HPU_LAZY_MODE" in str(found.value)


def test_an_error_inside_of_a_part_is_raised_as_it_is(hpu: Any) -> None:
    backend = hpu(lazy=False, switches=HpuSettings(graph_breaks=True))

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.trencadis_emulator.fp8_gemm_v2(a, b, torch.float16, a, b, None, 240.0)

    with pytest.raises((RuntimeError, StartupError)):
        Regions(RegionCompiler(backend.bridge, backend.settings))(multiply, *[torch.ones(2, 2).to(DEVICE)] * 2)


@pytest.mark.parametrize("form", ["short", "helper"])
def test_fused_attention_asks_no_builtin(hpu: Any, form: str) -> None:
    """Called without ``recompute_mode`` the wrapper asks a builtin, which ends a compiled part."""
    backend = hpu(lazy=False)
    sdpa = backend.bridge.fused_sdpa

    def attend(q: Tensor) -> Tensor:
        if form == "short":
            return sdpa(q, q, q, None, 0.0, True, 0.5, "None")
        return fused_attention(sdpa, q, q, q, None, True, 0.5, "None")

    q = torch.randn(1, 2, 8, 4)
    if form == "short":
        with pytest.raises(StartupError, match="is_enabled"):
            backend.hpu_ops.regions(attend, q.to(DEVICE))
        return
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)
    torch.testing.assert_close(backend.hpu_ops.regions(attend, q.to(DEVICE)).cpu(), want)


def test_the_variable_has_three_meanings() -> None:
    read = [settings({"VLLM_T_COMPILE_FULLGRAPH": v} if v else {}) for v in ("", "1", "0")]
    assert [(s.fullgraph, s.graph_breaks) for s in read] == [(True, True), (True, False), (False, False)]
