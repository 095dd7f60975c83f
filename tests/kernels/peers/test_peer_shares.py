"""Sums over ranks in two steps: values, launches of many lengths, mistakes that are found, and who takes what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.peers.mistakes import near_tell, no_wait, standing, weak_tell
from tests.oracles.layers.peer_runs import PeerRun
from trencadis.backends.cuda.kernels.peers import one_shot_reduce, symmetric_memory, two_shot_reduce

pytestmark = pytest.mark.usefixtures("interpreted")

LENGTHS = (40, 3, 90, 24)
"""Values of launches that follow each other: of several programs, and of some whose shares are empty."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a few values have several programs."""
    for module in (one_shot_reduce, two_shot_reduce):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(one_shot_reduce, "MOST", 256)
    monkeypatch.setattr(two_shot_reduce, "MOST", 512)


def test_every_rank_has_the_sums_and_the_same_bits() -> None:
    run = PeerRun(3, LENGTHS[:2], 3, True, steps=2)
    assert run.run() == set() and run.right()
    for room in run.rooms:
        assert room.launches[:3].tolist() == [4, 2, 0], "two words of each launch that has the program"


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_schedules(dtype: torch.dtype) -> None:
    count = 0
    for seed in range(60):
        run = PeerRun(2 + seed % 4, LENGTHS, seed, seed % 2 == 0, dtype, 2)
        found = run.run() if dtype == torch.float32 else (run.run(), set())[1]  # words of two values prove no race
        assert found == set() and run.right(), seed
        count += len(LENGTHS)
    print(f"\n{count} sums in two steps of each rank in random schedules")


@triton.jit
def nowhere_else(HALF: tl.constexpr):
    return 0


MISTAKES = {
    "nobody waits for messages": {"wait_for_all": no_wait},
    "nobody waits for sums": {"wait_for_sums": no_wait},
    "what is told of sums orders nothing": {"tell_sums": weak_tell},
    "what is told of messages is seen on one card": {"signal_peers": near_tell},
    "sums lie where messages do": {"sums_from": nowhere_else},
    "launches are not counted": {"advance": standing},
}


@pytest.mark.parametrize(
    "name", [n if "messages do" in n else pytest.param(n, marks=pytest.mark.long) for n in MISTAKES]
)
def test_each_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, mistake in MISTAKES[name].items():
        monkeypatch.setattr(two_shot_reduce, function, mistake)
    assert any(PeerRun(3, (24, 24), seed, steps=2).run() for seed in range(6))


def test_a_rank_that_never_comes_leaves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_reduce, "SPINS", 2)
    run = PeerRun(2, [8], 0, steps=2)
    run.turns.run([lambda: run.launch(0, 0)])
    assert run.out[0][0].isnan().all()


def test_steps_follow_from_bytes_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's kernel of one and two stages, and from where NCCL is not behind."""
    monkeypatch.undo()
    kib = 1 << 10
    sizes = (256, 257, 512, 513, 4096, 4097)
    found = {world: [two_shot_reduce.steps(size * kib, world) for size in sizes] for world in (2, 3, 4, 8, 9)}
    four = [1, 1, 1, 2, 2, 0]
    assert found == {2: [1, 1, 1, 0, 0, 0], 3: four, 4: four, 8: [1, 2, 2, 2, 2, 0], 9: [0] * 6}


def test_rooms_are_chosen_by_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_shot_reduce, "ONE_STEP", {2: 64, 4: 64})
    took: list[Any] = []
    for module, name in ((one_shot_reduce, "once"), (two_shot_reduce, "twice")):
        monkeypatch.setattr(module, "all_reduce", lambda x, room, residual, polls, name=name: took.append(name))
    rooms = [PeerRun(3, [8], 0, steps=steps).rooms[0] for steps in (1, 2)]
    both, one = symmetric_memory.PeerAllReduce(*rooms), symmetric_memory.PeerAllReduce(rooms[0])
    for count in (16, 17, 128):
        assert both.can_reduce(torch.zeros(count)) and one.can_reduce(torch.zeros(count)) == (count == 16)
        both.all_reduce(torch.zeros(count))
    assert took == ["once", "twice", "twice"] and not both.can_reduce(torch.zeros(129))
    assert not both.can_reduce(torch.zeros(6, 6).t())
