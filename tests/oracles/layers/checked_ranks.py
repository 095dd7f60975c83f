"""Ranks that check their sums over peer memory at the start, as threads in drawn turns, with stand-ins for NCCL, the
host group and graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.oracles.layers.rank_turns import RankTurns
from trencadis.backends.cuda.kernels.peers import start_check, symmetric_memory, two_shot_reduce
from trencadis.backends.cuda.kernels.peers.start_check import RankCalls
from trencadis.backends.cuda.kernels.peers.symmetric_memory import PeerAllReduce

CPU = torch.device("cpu")

Fault = Callable[[int, int, bool, Tensor], Tensor]
"""(rank, number of the launch, whether a graph replays it, the sum) -> what the launch returns instead."""


class CheckedRanks:
    """``world`` ranks; ``find()`` runs the check on all of them and returns what each found.

    Args:
        fault: changes what sums return, or raises.
    """

    def __init__(self, world: int, seed: int, fault: Fault | None = None) -> None:
        steps = (1, 2) if world >= two_shot_reduce.LEAST_RANKS else (1,)
        held = [
            [torch.zeros(symmetric_memory.peer_buffer_bytes(step, world), dtype=torch.uint8) for _ in range(world)]
            for step in steps
        ]
        self._buffers = [
            [
                symmetric_memory.make_peer_buffers(views, rank, CPU, step)
                for step, views in zip(steps, held, strict=True)
            ]
            for rank in range(world)
        ]
        self.turns, self._world, self._fault = RankTurns(seed, [x for views in held for x in views]), world, fault
        self._met: dict[int, dict[int, Any]] = {}
        self.launches, self.agreements, self.released = [0] * world, [0] * world, 0

    def find(self) -> list[str]:
        found = [""] * self._world

        def body(rank: int) -> Callable[[], None]:
            def run() -> None:
                found[rank] = self._check(rank)

            return run

        self.turns.run([body(rank) for rank in range(self._world)])
        return found

    def _check(self, rank: int) -> str:
        calls = [0]

        def meet(value: Any) -> list[Any]:
            number, calls[0] = calls[0], calls[0] + 1
            met = self._met.setdefault(number, {})
            met[rank] = value
            self.turns.wait_for(lambda: len(met) == self._world)
            return [met[other] for other in range(self._world)]

        def sum_by_library(x: Tensor) -> None:
            x.copy_(torch.stack(meet(x.clone())).sum(0))

        def agree(why: str) -> str:
            self.agreements[rank] += 1
            return next(filter(None, meet(why)), "")

        sums: Any = _FaultySums(self, rank, PeerAllReduce(*self._buffers[rank]))
        ranks = RankCalls(rank, self._world, sum_by_library, agree, lambda body: _Tape(self, sums, body))
        return start_check.find_fault(sums, ranks, (torch.float32,), CPU)

    def result(self, rank: int, out: Tensor, replayed: bool) -> Tensor:
        """Returns what a launch of ``rank`` returns."""
        self.launches[rank] += 1
        return out if self._fault is None else self._fault(rank, self.launches[rank], replayed, out)


class _FaultySums:
    def __init__(self, ranks: CheckedRanks, rank: int, sums: PeerAllReduce) -> None:
        self._ranks, self._rank, self._sums, self.replayed = ranks, rank, sums, False
        self.can_reduce = sums.can_reduce

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, polls: int | None = None) -> Tensor:
        out = self._sums.all_reduce(x, residual, polls)
        return self._ranks.result(self._rank, out, self.replayed)


class _Tape:
    """A graph that runs its body again."""

    def __init__(self, ranks: CheckedRanks, sums: _FaultySums, body: Callable[[], list[Tensor]]) -> None:
        self._ranks, self._sums, self._body = ranks, sums, body
        body()

    def replay(self) -> list[Tensor]:
        self._sums.replayed = True
        try:
            return self._body()
        finally:
            self._sums.replayed = False

    def release(self) -> None:
        self._ranks.released += 1
