"""Sums over peer memory are served where a check at the start finds them right on every rank; else NCCL sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.peers.mistakes import no_wait, standing
from tests.oracles.layers.checked_ranks import CheckedRanks, Fault
from trencadis.backends.cuda import nccl_comm
from trencadis.backends.cuda.kernels import gpu_platform
from trencadis.backends.cuda.kernels.peers import one_shot_reduce, start_check, symmetric_memory, two_shot_reduce
from trencadis.backends.cuda.shape_policy import PEER_SUMS, sum_bytes
from trencadis.core.errors import StartupError

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a few values, and few launches."""
    for module in (one_shot_reduce, two_shot_reduce):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(one_shot_reduce, "MOST", 128)
    monkeypatch.setattr(two_shot_reduce, "MOST", 192)
    monkeypatch.setattr(two_shot_reduce, "ONE_STEP", {2: 128, 4: 96})
    for name, value in (("ROUNDS", 3), ("PART", 1), ("REPLAYS", 1), ("POLLS", 1 << 20)):
        monkeypatch.setattr(start_check, name, value)


def test_right_sums_pass_on_all_ranks() -> None:
    ranks = CheckedRanks(3, 0)
    assert ranks.find() == [""] * 3 and ranks.released == 3
    assert len(set(ranks.launches)) == 1 and ranks.launches[0] > 40


def wrong(rank: int, number: int, replayed: bool, out: Tensor) -> Tensor:
    return out + (rank == 1 and number == 30)


def late(rank: int, number: int, replayed: bool, out: Tensor) -> Tensor:
    return out * float("nan") if (rank, number) == (0, 31) else out


def fails(rank: int, number: int, replayed: bool, out: Tensor) -> Tensor:
    if (rank, number) == (1, 20):
        raise RuntimeError("out of resource\nmore lines")
    return out


def wrong_in_graph(rank: int, number: int, replayed: bool, out: Tensor) -> Tensor:
    return out + (rank == 0 and replayed)


FAULTS: dict[str, tuple[Fault, str]] = {
    "a wrong sum on one rank": (wrong, "differs from the library's on rank 1"),
    "a late rank": (late, "did not arrive in time on rank 0"),
    "an exception on one rank": (fails, "out of resource"),
    "a wrong sum in the graph alone": (wrong_in_graph, "in a graph differs from the library's on rank 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_all_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_check, "POLLS", 200)
    fault, text = FAULTS[name]
    ranks = CheckedRanks(2, 1, fault)
    one, other = ranks.find()
    assert one == other and text in one and "\n" not in one, one
    assert ranks.agreements[0] == ranks.agreements[1] and ranks.released in (0, 2)


@pytest.mark.parametrize(("name", "mistake"), [("wait_for_all", no_wait), ("advance", standing)])
def test_wrong_protocols_do_not_pass(name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns that may pass at every access, in which a rank reads too early."""
    monkeypatch.setattr(one_shot_reduce, name, mistake)
    monkeypatch.setattr(start_check, "POLLS", 200)
    assert "a sum of" in CheckedRanks(2, 2).find()[0]


def test_lengths_are_of_both_ways_and_at_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for world in (2, 4, 5, 8):
        sizes = [2 * n for n in start_check._lengths(world, torch.bfloat16)]
        steps = [two_shot_reduce.steps(size, world) for size in sizes]
        once = two_shot_reduce.one_step_bytes(world)
        assert min(sizes) == 16 and once in sizes and set(steps) == ({1} if world == 2 else {1, 2})
        assert world == 2 or {once + 2, two_shot_reduce.MOST} <= set(sizes)
        assert any(size // 2 % one_shot_reduce.BLOCK for size in sizes[1:])


def test_the_planner_knows_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for world in range(1, 10):
        steps = () if not 2 <= world <= 8 else (1,) if world == 2 else (1, 2)
        buffers = sum(symmetric_memory.peer_buffer_bytes(step, world) for step in steps)
        assert sum_bytes(world) == buffers and bool(buffers) == (
            world > 1 and two_shot_reduce.one_step_bytes(world) > 0
        )


# The communicator


class _Card(gpu_platform.Accelerator):
    """CPU tensors in the place of a card's."""

    name = "cpu"
    module: Any = torch.cpu  # type: ignore[misc]
    runs_ptx = True  # type: ignore[misc]

    def can_access_peer(self, device: int, other: int) -> bool:
        return True


def opened(monkeypatch: pytest.MonkeyPatch, open_sums: Callable[..., Any], **env: str) -> Any:
    """A communicator of two ranks whose peer memory is opened by ``open_sums``."""
    monkeypatch.setattr(nccl_comm, "in_use", _Card)
    monkeypatch.setattr(symmetric_memory, "open_peer_memory", open_sums)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group=None: x.mul_(2))
    monkeypatch.delenv(PEER_SUMS, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    cfg: Any = type("", (), {"rank": 0, "world": 2, "stages": 1, "dtype": torch.float32})
    runtime: Any = type("", (), {"device": torch.device("cpu")})
    return nccl_comm.CudaComm(cfg, runtime)


def test_sums_are_the_default_and_a_fault_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled:
        def can_reduce(self, x: Tensor) -> bool:
            return True

        def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
            return x * 20

    comm = opened(monkeypatch, lambda *args: (Doubled(), ""))
    assert comm.all_reduce(torch.ones(2)).tolist() == [20, 20] and comm.notes == ()
    comm = opened(monkeypatch, lambda *args: (None, "two hosts"))
    assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert comm.notes == ("small sums over ranks go over NCCL: two hosts",)
    comm = opened(monkeypatch, lambda *args: (None, "two hosts"), TRENCADIS_CUDA_PEER_SUMS="1")
    assert comm.notes == ("TRENCADIS_CUDA_PEER_SUMS=1 has no effect: small sums over ranks go over NCCL: two hosts",)
    comm = opened(monkeypatch, lambda *args: pytest.fail("opened"), TRENCADIS_CUDA_PEER_SUMS="0")
    assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2] and comm.notes == ()


def test_a_failed_check_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a card that it has stopped ends the start with the setting that leaves the check out."""
    monkeypatch.setattr(symmetric_memory, "in_use", _Card)
    monkeypatch.setattr(
        _Card, "module", type("", (), {"synchronize": lambda device: None, "empty_cache": lambda: None})
    )
    monkeypatch.setattr(torch.distributed, "all_gather_object", _fill)
    monkeypatch.setattr(symmetric_memory, "unreachable_reason", lambda *args: "")
    buffers = [CheckedRanks(2, 0)._buffers[0][0]]
    monkeypatch.setattr(symmetric_memory, "_allocate_buffers", lambda *args: (buffers, ""))
    held: list[Any] = [[torch.zeros(1)]]
    monkeypatch.setattr(symmetric_memory, "_HELD", held)
    monkeypatch.setattr(start_check, "find_fault", lambda *args: "")
    args: Any = (None, None, 0, 2, torch.device("cpu"), (torch.float32,), None)
    sums, why = symmetric_memory.open_peer_memory(*args)
    assert sums is not None and why == "" and held
    monkeypatch.setattr(start_check, "find_fault", lambda *args: "a sum differs")
    assert symmetric_memory.open_peer_memory(*args) == (None, "the check at the start: a sum differs") and not held

    def stopped(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(_Card.module, "synchronize", stopped)
    with pytest.raises(StartupError, match=r"a sum differs.*TRENCADIS_CUDA_PEER_SUMS=0"):
        symmetric_memory.open_peer_memory(*args)


def _fill(out: list[Any], value: Any, group: Any = None) -> None:
    out[:] = [value] * len(out)
