"""Attention by FlashAttention and FlashInfer, held as our kernels are; stand-ins keep the libraries' rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.attention import flash, flashinfer
from tests.fakes.attention.paged import KernelFault
from tests.oracles.attention_cases import Case, Prepared, check, prepared, step_inputs
from tests.oracles.happens_before import races
from trencadis.backends.cuda import runtime_of
from trencadis.backends.cuda.attention_libraries.attention_library_selector import SelectedLibrary, select_library
from trencadis.backends.cuda.attention_libraries.library_attention import (
    FlashAttnLaunch,
    FlashInferLaunch,
    FlashInferWorkspace,
    FlashInferWorkspaces,
)
from trencadis.backends.cuda.attention_libraries.ops_with_attention_library import AttentionLibraryAdapter, with_library
from trencadis.backends.cuda.cpu_twin.ops import TwinOps
from trencadis.backends.cuda.cpu_twin.twin_runtime import TwinRuntime
from trencadis.backends.cuda.launches.cuda_host_arrays import arrays
from trencadis.backends.cuda.launches.input_buffers import InputBuffers, StageBuffer
from trencadis.backends.cuda.runtime_protocol import Stream
from trencadis.core.device.backend import LayerKV

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = {
    "flash2": ("FLASH_ATTN", 80, 256), "flash3": ("FLASH_ATTN", 90, 16), "torch": ("FLASH_ATTN", 90, 256),
    "flashinfer": ("FLASHINFER", 90, 32),
}  # fmt: skip
"""Name, architecture, and a size of blocks that the library takes."""

ROWS = ((0, 12), (21, 1), (300, 3), (520, 1), (0, 2))
CASES = {
    "prompts and decoding rows": Case(ROWS, group=3, kv_heads=2, d=64, dtype=BF16, shared=True),
    "no surplus": Case(((5, 9), (600, 4)), group=7, kv_heads=1, d=128, dtype=FP16, spare=(0, 0)),
    "one row of many": Case(((256, 40),), group=1, kv_heads=2, d=64, dtype=BF16, spare=(6, 8)),
    "decoding": Case(((9, 1), (0, 1), (600, 1), (255, 1)), True, group=4, kv_heads=2, d=64, dtype=BF16, shared=True),
    "decoding alone": Case(((512, 1),), True, group=1, kv_heads=2, d=128, dtype=FP16, spare=(0, 0)),
}
WINDOWS = {
    "window": dataclasses.replace(CASES["prompts and decoding rows"], window=33),
    "decoding in a window": dataclasses.replace(CASES["decoding"], window=40),
    "a window of all": dataclasses.replace(CASES["decoding"], window=700),
}


@pytest.fixture(params=[*KINDS, "flashinfer Hopper"])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SelectedLibrary:
    """Each library as ``--attention-backend`` finds it."""
    kind, _, card = request.param.partition(" ")
    if kind == "flashinfer":
        flashinfer.install(monkeypatch, hopper=bool(card))
    elif kind == "torch":
        flash.install_torch(monkeypatch)
    else:
        flash.install(monkeypatch, int(kind[-1]))
    name, arch, _ = KINDS[kind]
    made = select_library(name, arch)
    assert made.kind == kind
    return made


def ready_of(case: Case, found: SelectedLibrary, device: torch.device) -> Prepared:
    """A launch whose attention is the library's. Keys before windows are no poison: a tile of theirs may read them."""
    case = dataclasses.replace(case, block=KINDS[found.kind][2], processors=132)
    ready = prepared(dataclasses.replace(case, window=0), device)
    ready.case = case
    runtime = runtime_of(device)
    launch: Any
    if found.kind == "flashinfer":
        buffers = InputBuffers(case.bucket, case.sizes, runtime)
        buffers.tensors = ready.tensors
        launch = FlashInferLaunch(found.calls, buffers, runtime, FlashInferWorkspaces(runtime), case.d, case.dtype)
        host = arrays(case.bucket, ready.inputs, case.sizes)
        launch.plan({name: getattr(host.attn, name) for name in ("row_start", "context", "block_start")})
    else:
        launch = FlashAttnLaunch(found.calls["attend"], found.kind, case.bucket, case.sizes)

    def attend(turned: torch.Tensor) -> None:
        launch.begin(ready.tensors.attn)
        ready.out.copy_(launch.attend(turned, ready.cache, case.d**-0.5, case.window))

    ready.attend = attend  # type: ignore[method-assign]
    return ready


SAMPLE = "prompts and decoding rows", "decoding"


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_a_launch_equals_the_reference(name: str, found: SelectedLibrary, device: torch.device) -> None:
    ready = ready_of(CASES[name], found, device)
    check(ready, ready.run())


@pytest.mark.parametrize("name", [n if "decoding" in n else pytest.param(n, marks=pytest.mark.long) for n in WINDOWS])
def test_windows(name: str, found: SelectedLibrary, device: torch.device) -> None:
    if not found.limits.windows:
        pytest.skip("its layers with windows are attended to by our kernels")
    ready = ready_of(WINDOWS[name], found, device)
    check(ready, ready.run())


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_drawn_launches(part: int, found: SelectedLibrary, device: torch.device) -> None:
    """Twenty each."""
    rng = np.random.default_rng(part)
    errors = []
    for _ in range(20):
        decode = bool(rng.integers(2))
        rows = [
            (int(rng.integers(0, 700)), 1 if decode else int(rng.integers(1, 40))) for _ in range(rng.integers(1, 7))
        ]
        case = Case(
            tuple(rows), decode, int(rng.integers(1, 9)), int(rng.integers(1, 3)), int(rng.choice((64, 128, 256))),
            dtype=(BF16, FP16)[rng.integers(2)], spare=(int(rng.integers(0, 4)), int(rng.integers(0, 20))),
            shared=bool(rng.integers(2)), window=int(rng.choice((0, 0, 16, 129))) if found.limits.windows else 0,
        )  # fmt: skip
        ready = ready_of(case, found, device)
        errors.append(check(ready, ready.run()))
    print(f"\n{found.label}, part {part}: {len(errors)} launches, largest error {max(errors):.1e}")


CASE = dataclasses.replace(CASES["decoding"], shared=False)


class Captured:
    """Two buckets of a stage on the twin, each with a graph of two layers, which work in one room."""

    def __init__(self, found: SelectedLibrary, apart: bool = False) -> None:
        """``apart``: each bucket has a buffer of inputs of its own."""
        self.found, self.runtime, self.apart = found, TwinRuntime(record=[]), apart
        self.ops = with_library(TwinOps, found)(self.runtime.accounted)
        self.library = AttentionLibraryAdapter(self.ops, self.runtime, CASE.d, CASE.dtype)
        self.case = dataclasses.replace(CASE, block=KINDS[found.kind][2], processors=132)
        self.made = [self._bucket(rows) for rows in (6, 4)]

    def _bucket(self, rows: int) -> Any:
        from trencadis.backends.cuda.backend import CudaProgram
        from trencadis.backends.cuda.launches.input_buffers import StageBuffers
        from trencadis.core.buckets import Bucket, Stage

        if self.apart or not hasattr(self, "rooms"):
            self.rooms, self.fetched = StageBuffers(self.runtime), self.runtime.event()
        generator = torch.Generator().manual_seed(rows)
        d, groups, heads = self.case.d, self.case.kv_heads, self.case.kv_heads * self.case.group
        q = torch.randn(rows, heads, d, generator=generator).to(self.case.dtype)
        k, v = (torch.randn(64, self.case.block, groups, d, generator=generator).to(self.case.dtype) for _ in range(2))
        kv = LayerKV(k, v)

        def body(inputs: Any) -> Any:
            return tuple(self.ops.attend(q, q, q, kv, inputs.attn, d**-0.5) for _ in range(2))

        program = CudaProgram(
            Bucket(Stage.DECODE, (rows,)), body, self.case.sizes, self.runtime, self.rooms, self.fetched, self.library
        )
        plain = TwinOps(self.runtime.accounted)
        return program, lambda: plain.attend(q, q, q, kv, program.inputs.attn, d**-0.5)

    def step(self, place: int, lengths: tuple[int, ...]) -> None:
        """One launch of a bucket, by its graph if it has one, and what it must give."""
        program, expected = self.made[place]
        case = dataclasses.replace(self.case, rows=tuple((n, 1) for n in lengths))
        program.fill(step_inputs(case))
        out = program.replay()
        live = len(lengths)
        for got in out:
            assert torch.allclose(got[:live], expected()[:live], atol=2e-2) and not got[live:].any()


def ordered(calls: list[Any]) -> int:
    """Plans among ``calls``: the host waits for the copy of the plan before, and the copy for the launch that reads."""
    plans = [i for i, call in enumerate(calls) if call.kind == "upload" and len(call.writes) == 4]
    for i in plans:
        said = [(c.kind, c.stream) for c in calls[max(i - 7, 0) : i + 4]]
        assert said[-11:] == [
            ("host write", "host"), ("wait", "uploads"), ("upload", "uploads"), ("wait", "host"),
            *[("host write", "host")] * 3, ("upload", "uploads"), *[("record", "uploads")] * 3,
        ]  # fmt: skip
    return len(plans)


def test_graphs_read_the_lengths_of_each_launch(found: SelectedLibrary) -> None:
    """Planned before each launch, never within a capture; buckets of a stage take turns in one room."""
    both = Captured(found)
    both.step(0, (3, 40, 5))
    for program, _ in both.made:
        program.capture()
    for place, lengths in ((0, (100, 2, 33, 7)), (1, (5,)), (0, (1,)), (1, (64, 0, 9, 31)), (1, (65, 1))):
        both.step(place, lengths)
    assert races(both.runtime.calls or []) == []
    if found.kind == "flashinfer":
        assert flashinfer.Wrapper.plans == 8 and flashinfer.Wrapper.blocking == 0
        assert ordered(both.runtime.calls or []) == 8


def one_for_all(self: FlashInferWorkspaces, inputs: Any, floats: int, ints: int) -> FlashInferWorkspace:
    """A room that belongs to no buffer of inputs."""
    room = next(iter(self._shared.values()), None) or FlashInferWorkspace(floats, ints, self._runtime)
    self._shared[inputs] = room
    return room


def rash(self: StageBuffer, used: int, beside: Any = None) -> None:
    """Plans before it waits for the launch that reads the plan before."""
    if beside is not None:
        beside()
    sent(self, used)


def late(self: TwinRuntime, event: Any, stream: Stream) -> None:
    """``record``, but for what a room of plans records as it is made."""
    if not self.counts["host write"]:
        return
    recorded(self, event, stream)


sent, recorded = StageBuffer.send, TwinRuntime.record

MISTAKES: dict[str, tuple[type, str, Any]] = {
    "a room belongs to no buffer of inputs": (FlashInferWorkspaces, "of", one_for_all),
    "a plan does not wait for the launch that reads": (StageBuffer, "send", rash),
    "a plan does not wait for the zeros of its buffers": (TwinRuntime, "record", late),
    "the host writes what is being copied": (TwinRuntime, "host_wait", lambda self, event: None),
}


@pytest.mark.parametrize("name", [None, *MISTAKES], ids=str)
def test_each_mistake_in_the_order_of_plans_is_caught(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By events alone, over what launches read of the memory of plans; buckets with inputs of their own share none."""
    if name is not None:
        monkeypatch.setattr(*MISTAKES[name])
    flashinfer.install(monkeypatch)
    both = Captured(select_library("FLASHINFER", 90), apart=True)
    for program, _ in both.made:
        program.capture()
    for place in (0, 1, 1, 0, 0):
        program, _ = both.made[place]
        program.fill(step_inputs(dataclasses.replace(both.case, rows=((3, 1), (9, 1)))))
        program.replay()
    assert bool(races(both.runtime.calls or [])) == (name is not None)


def test_a_plan_of_another_launch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan a graph computes with old lengths; behind another bucket's it reads a plan that is not its own."""
    flashinfer.install(monkeypatch)
    both = Captured(select_library("FLASHINFER", 90))
    for program, _ in both.made:
        program.capture()
    both.step(0, (3, 4))
    first, second = (program for program, _ in both.made)
    first.fill(step_inputs(dataclasses.replace(both.case, rows=((3, 1), (9, 1)))))
    second.fill(step_inputs(dataclasses.replace(both.case, rows=((8, 1),))))
    with pytest.raises(KernelFault, match="not that of this launch"):
        first.replay()
    first.buffers.on_copy = None
    both.step(1, (9,))
    with pytest.raises((AssertionError, KernelFault)):
        both.step(0, (3, 5))


def test_a_plan_within_a_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer.install(monkeypatch)
    both = Captured(select_library("FLASHINFER", 90))
    program, _ = both.made[0]
    plan, body = program.buffers.on_copy, program.body

    def planning(inputs: Any) -> Any:
        plan({name: np.asarray(getattr(inputs.attn, name)) for name in ("row_start", "context", "block_start")})
        return body(inputs)

    program.fill(step_inputs(both.case))
    program.body = planning
    with pytest.raises(RuntimeError, match="cannot be used in Cuda Graph"):
        program.capture()


def test_pages_of_another_size_are_refused_by_version_2(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    flash.install(monkeypatch, 2)
    two = select_library("FLASH_ATTN", 80)
    case = CASES["no surplus"]
    ready = prepared(case, device)
    launch = FlashAttnLaunch(two.calls["attend"], "flash2", case.bucket, case.sizes)
    launch.begin(ready.tensors.attn)
    with pytest.raises(RuntimeError, match="divisible by 256"):
        launch.attend(torch.zeros_like(ready.q).contiguous(), ready.cache, 0.1, 0)


@pytest.mark.parametrize("field", ["queries", "single"])
def test_a_number_of_the_host_that_is_too_small_is_found(
    field: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    flash.install(monkeypatch, 3)
    three = select_library("FLASH_ATTN", 90)
    case = CASES["no surplus"]
    ready = prepared(case, device)
    launch = FlashAttnLaunch(three.calls["attend"], "flash3", case.bucket, case.sizes)
    setattr(launch, f"_{field}", 1)
    if field == "queries":
        launch.begin(ready.tensors.attn)
        with pytest.raises(KernelFault, match="told 1"):
            launch.attend(torch.zeros_like(ready.q).contiguous(), ready.cache, 0.1, 0)
    else:
        launch.begin(ready.tensors.attn)
        out = launch.attend(torch.zeros_like(ready.q).contiguous(), ready.cache, 0.1, 0)
        assert out.isnan().any(), "tokens of no row are not written"


@pytest.mark.parametrize(("newer", "kernels"), [(True, "fa3"), (False, "fa2")])
def test_prompts_have_the_kernels_that_flashinfer_picks(
    newer: bool, kernels: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Those of version 3 on Hopper, where a wrapper has no 64 MiB of its own for them; DECODE keeps version 2."""
    flashinfer.install(monkeypatch, hopper=True, newer=newer)
    infer = select_library("FLASHINFER", 90)
    ready_of(CASES["prompts and decoding rows"], infer, device).run()
    assert flashinfer.Wrapper.backends == {kernels}
    ready_of(CASES["decoding"], infer, device).run()
    assert flashinfer.Wrapper.backends == {kernels, "fa2"}
