"""Sums of several ranks over each other's memory, in drawn turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.layers.rank_turns import RankTurns
from trencadis.backends.cuda.kernels.peers import one_shot_reduce, symmetric_memory, two_shot_reduce

WAYS = {1: one_shot_reduce.all_reduce, 2: two_shot_reduce.all_reduce}
LAUNCHES = 4


class PeerRun:
    """Some launches on each rank, checked; a message of each launch has values of its own.

    Args:
        counts: values of each launch.
        steps: of each sum.
    """

    def __init__(
        self, world: int, counts: Sequence[int], seed: int, added: bool = False, dtype: torch.dtype = torch.float32,
        steps: int = 1,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.buffers = [
            torch.zeros(symmetric_memory.peer_buffer_bytes(steps, world), dtype=torch.uint8) for _ in range(world)
        ]
        cpu = torch.device("cpu")
        self.rooms = [symmetric_memory.make_peer_buffers(self.buffers, rank, cpu, steps) for rank in range(world)]
        self.x = [torch.randn(world, count, generator=generator).to(dtype) for count in counts]
        self.residual = [torch.randn(count, generator=generator).to(dtype) if added else None for count in counts]
        self.out: list[list[Tensor]] = [[] for _ in range(world)]
        self.turns, self.steps = RankTurns(seed, self.buffers), steps

    def launch(self, rank: int, i: int) -> None:
        x = self.x[i][rank].contiguous()
        self.out[rank].append(WAYS[self.steps](x, self.rooms[rank], self.residual[i]))

    def run(self) -> set[str]:
        """Races."""

        def body(rank: int) -> Any:
            return lambda: [self.launch(rank, i) for i in range(len(self.x))]

        self.turns.run([body(rank) for rank in range(len(self.rooms))])
        return self.turns.races

    def right(self) -> bool:
        """Whether all ranks have the sums, and the same bits."""
        for i, x in enumerate(self.x):
            residual = self.residual[i]
            want = x.double().sum(0) + (0 if residual is None else residual.double())
            near = 1e-5 if x.dtype == torch.float32 else 2e-2
            for outs in self.out:
                if not torch.allclose(outs[i].double(), want, rtol=near, atol=near):
                    return False
                if not torch.equal(outs[i], self.out[0][i]):
                    return False
        return True
