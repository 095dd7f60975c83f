"""The emulated card's accounts of memory; out of memory at every place, and values after each failure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trencadis.backends.hpu.emulator.card_profiles_and_op_support import Profile, profile
from trencadis.backends.hpu.emulator.device_tensor import DEVICE
from trencadis.backends.hpu.emulator.emulated_bridge import use
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.emulated_errors import EmulatedOutOfMemory
from trencadis.backends.hpu.emulator.emulated_hpu_graphs import wrap
from trencadis.backends.hpu.emulator.injected_faults import parse
from trencadis.core.errors import StartupError

ROOT = Path(__file__).resolve().parent.parent.parent


class Double(torch.nn.Module):
    """[n] -> [n], with an intermediate of 4 n values."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[None].expand(4, -1) * 2).sum(0)


def balanced(card: EmulatedDevice) -> None:
    assert card.allocator.free + sum(card.allocator.used.values()) == card.allocator.total
    assert all(v >= 0 for v in card.allocator.used.values())


def test_storages_count_once(card: EmulatedDevice) -> None:
    x = torch.zeros(100, 4).to(DEVICE)
    views = [x.view(-1), x[3:], x.t()]
    assert card.allocator.used["tensors"] == 1600
    del x
    assert card.allocator.used["tensors"] == 1600, "a view keeps the storage"
    del views
    assert card.allocator.used["tensors"] == 0
    balanced(card)


def test_large_tensors_are_not_backed(card: EmulatedDevice) -> None:
    x = torch.zeros(8, 1 << 30, dtype=torch.int8, device=DEVICE)
    row = torch.tensor([5]).to(DEVICE)
    x[:, :4].index_copy_(0, row, torch.ones(1, 4, dtype=torch.int8).to(DEVICE))
    assert x[5, :6].cpu().tolist() == [1, 1, 1, 1, 0, 0]
    assert card.allocator.used["tensors"] == (8 << 30) + row.nbytes


def test_workspace_only_grows(card: EmulatedDevice) -> None:
    sizes = []
    for n in (10, 1000, 20):
        wrap(card, Double()).forward(torch.zeros(n).to(DEVICE), bypass_hpu_graphs=True)
        sizes.append(card.allocator.used["workspace"])
    assert sizes[0] < sizes[1] == sizes[2]
    balanced(card)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_graphs_are_priced_and_given_up(share: float, card: EmulatedDevice) -> None:
    card.faults = parse(f"return:{share}")
    graph: Any = wrap(card, Double())
    out = graph.forward(torch.ones(100).to(DEVICE))
    cost = card.allocator.used["graphs"]
    assert cost == 400 + card.profile.graph_bytes
    assert out.cpu().tolist() == [8.0] * 100
    graph.clear_cache()
    assert card.allocator.used["graphs"] == 0 and card.allocator.used["not returned"] == cost - int(cost * share)
    balanced(card)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_out_of_memory_at_capture_k(k: int, card: EmulatedDevice) -> None:
    """The k-th graph is missing, all others exist, and its launch still runs uncaptured."""
    card.faults = parse(f"oom@capture:{k}")
    failed = 0
    for n in range(1, 5):
        graph: Any = wrap(card, Double())
        x = torch.full((n,), 1.5).to(DEVICE)
        try:
            out = graph.forward(x)
        except EmulatedOutOfMemory:
            failed += 1
            out = graph.forward(x, bypass_hpu_graphs=True)
        assert out.cpu().tolist() == [12.0] * n
        balanced(card)
    assert failed == 1 and card.scope is None


@pytest.mark.parametrize("k", [1, 2, 3])
def test_out_of_memory_at_step_k(k: int, card: EmulatedDevice) -> None:
    card.faults = parse(f"oom@step:{k}")
    graph: Any = wrap(card, Double())
    x, failed = torch.ones(3).to(DEVICE), 0
    for _ in range(4):
        try:
            out = graph.forward(x)
        except EmulatedOutOfMemory:
            failed += 1
            out = graph.forward(x)
        assert out.cpu().tolist() == [8.0] * 3
    assert failed == 1
    balanced(card)


def test_memory_that_is_not_there() -> None:
    card = use(EmulatedDevice(Profile("small", 1 << 20)))
    with pytest.raises(EmulatedOutOfMemory, match=r"Allocation failed|workspace Allocation"):
        torch.zeros(1 << 20).to(DEVICE)
    kept = torch.zeros(100_000).to(DEVICE)
    with pytest.raises(EmulatedOutOfMemory):
        wrap(card, Double()).forward(kept)
    assert card.scope is None and card.allocator.used["graphs"] == 0
    balanced(card)


def test_meta_keeps_the_same_books() -> None:
    books = []
    for computes in (True, False):
        card = use(EmulatedDevice(profile("gaudi3"), computes))
        graph: Any = wrap(card, Double())
        x = torch.ones(50).to(DEVICE)
        graph.forward(x, bypass_hpu_graphs=True)
        out = graph.forward(x)
        books.append((dict(card.allocator.used), card.clock.compiles, card.clock.seconds, card.allocator.total))
        assert out.shape == (50,) and out.cpu().shape == (50,)
    assert books[0] == books[1] and books[0][3] == int(126.5 * (1 << 30))


def test_crash_inside_a_capture() -> None:
    code = (
        "import torch; from trencadis.backends.hpu.emulator.emulated_bridge import bridge\n"
        "b = bridge({'TRENCADIS_HPU_EMULATOR_FAULTS': 'crash@capture:2'})\n"
        "for n in (1, 2):\n"
        "    b.wrap_in_hpu_graph(torch.nn.Identity()).forward(torch.ones(n).to(b.device)); print(n, flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == -9 and done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("text", ["oom", "oom@capture", "oom@launch:3", "return:2", "crash@step:x"])
def test_faults_that_cannot_be_read(text: str) -> None:
    with pytest.raises(StartupError, match="is none of"):
        parse(text)


def test_program_states_and_bytes(hpu: Callable[..., Any]) -> None:
    from trencadis.core.buckets import Bucket, Stage
    from trencadis.core.device.backend import ProgramState

    backend = hpu(block_size=4, faults="return:1")
    before = backend.memory.free()
    program = backend.program(Bucket(Stage.DECODE, (2, 4)), lambda x: x.tokens * 2)
    inputs = before - backend.memory.free()
    assert program.state == ProgramState.PLANNED and program.bytes == inputs > 0
    program.compile()
    assert program.state == ProgramState.COMPILED and program.replay().cpu().tolist() == [0, 0]
    program.capture()
    assert program.state == ProgramState.CAPTURED and program.bytes > inputs
    cost = program.bytes - inputs
    assert program.release() == cost and program.state == ProgramState.COMPILED and program.release() == 0
    from trencadis.core.device.backend import OutOfDeviceMemory

    poor = hpu(faults="oom@capture:1,oom@step:2").program(Bucket(Stage.DECODE, (2, 4)), lambda x: x.tokens)
    poor.run()
    for failing in (poor.capture, poor.run):
        with pytest.raises(OutOfDeviceMemory):
            failing()
        assert poor.state is ProgramState.COMPILED
    poor.capture()
    assert poor.replay().cpu().tolist() == [0, 0]
    eager = hpu(lazy=False).program(Bucket(Stage.DECODE, (2, 4)), lambda x: x.tokens)
    eager.run()
    eager.capture()
    assert eager.state is ProgramState.COMPILED, "compile mode has no graphs"
