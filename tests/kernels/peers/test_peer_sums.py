"""Ranks sum over each other's memory: values, order, and mistakes in the protocol that the checker finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.peers.mistakes import near_tell, no_wait, standing, weak_tell
from tests.oracles.layers.peer_runs import LAUNCHES, PeerRun
from trencadis.backends.cuda.kernels.peers import one_shot_reduce, symmetric_memory
from trencadis.backends.cuda.nccl_comm import CudaComm

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a few values have several programs."""
    monkeypatch.setattr(one_shot_reduce, "BLOCK", 8)
    monkeypatch.setattr(one_shot_reduce, "MOST", 256)


@pytest.mark.parametrize(("world", "added"), [(2, False), (3, True)])
def test_every_rank_has_the_sum_and_the_same_bits(world: int, added: bool) -> None:
    run = PeerRun(world, [12] * LAUNCHES, world, added)
    assert run.run() == set() and run.right()
    for room in run.rooms:
        assert room.launches[:2].tolist() == [LAUNCHES] * 2


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_schedules(dtype: torch.dtype) -> None:
    count = 0
    for seed in range(60):
        run = PeerRun(2 + seed % 3, [20] * LAUNCHES, seed, seed % 2 == 0, dtype)
        found = run.run() if dtype == torch.float32 else (run.run(), set())[1]  # words of two values prove no race
        assert found == set() and run.right(), seed
        count += LAUNCHES
    print(f"\n{count} sums of each rank in random schedules")


def swapped(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    for name, function in functions.items():
        monkeypatch.setattr(one_shot_reduce, name, function)


@triton.jit
def one_wait(flags, part, launch, most_polls, RANK: tl.constexpr, WORLD: tl.constexpr):
    own = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + part * WORLD
    while tl.atomic_add(own, 0, sem="acquire", scope="sys") < launch:
        pass
    return launch * 0


@triton.jit
def one_half(launch, HALF: tl.constexpr):
    return launch * 0


MISTAKES = {
    "nobody waits": {"wait_for_all": no_wait},
    "one rank is waited for": {"wait_for_all": one_wait},
    "messages have one half": {"half_of": one_half},
    "what is told is seen on one card": {"signal_peers": near_tell},
    "what is told orders nothing": {"signal_peers": weak_tell},
    "launches are not counted": {"advance": standing},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped(monkeypatch, **MISTAKES[name])
    assert any(PeerRun(2, [8] * LAUNCHES, seed).run() for seed in range(6))


def test_a_rank_that_never_comes_leaves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_reduce, "SPINS", 3)
    run = PeerRun(2, [8] * LAUNCHES, 0)
    run.turns.run([lambda: run.out[0].append(one_shot_reduce.all_reduce(run.x[0][0].contiguous(), run.rooms[0]))])
    assert run.out[0][0].isnan().all()


def test_why_peers_cannot_be_reached() -> None:
    def reaches(own: int, other: int) -> bool:
        return other != 2

    assert symmetric_memory.unreachable_reason(["a", "a"], [0, 1], 0, reaches) == ""
    assert symmetric_memory.unreachable_reason(["a", "b"], [0, 1], 0, reaches) == "ranks 0 and 1 are on two hosts"
    assert symmetric_memory.unreachable_reason(["a", "a"], [1, 1], 1, reaches) == "ranks 1 and 0 share a card"
    assert (
        symmetric_memory.unreachable_reason(["a"] * 3, [0, 1, 2], 0, reaches)
        == "card 0 does not reach the memory of card 2"
    )


def test_long_messages_go_over_the_library() -> None:
    run = PeerRun(2, [8] * LAUNCHES, 0)
    room = run.rooms[0]
    assert one_shot_reduce.can_reduce(torch.zeros(64), room) and not one_shot_reduce.can_reduce(torch.zeros(65), room)
    assert not one_shot_reduce.can_reduce(torch.zeros(4, 4).t(), room) and not one_shot_reduce.can_reduce(
        torch.zeros(0), room
    )
    comm: Any = CudaComm.__new__(CudaComm)
    comm._peers = symmetric_memory.PeerAllReduce(room)
    assert comm.sum_added(torch.zeros(65), torch.zeros(65)) is None
    comm._peers = None
    assert comm.sum_added(torch.zeros(8), torch.zeros(8)) is None
