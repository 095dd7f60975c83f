"""Collectives of one rank group, over HCCL (gloo where the card is emulated); agreements go over the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.bridge import Bridge


class HpuComm:
    """``core.backend.Comm``; layers cut the graph before they call it. A world of one does nothing.

    With several ranks the constructor is a collective: each makes the host's group.

    Args:
        alone: this process stands for all ranks, which it has no need to ask.
    """

    def __init__(self, bridge: Bridge, rank: int, world: int, alone: bool = False) -> None:
        self._bridge, self.rank, self.world = bridge, rank, world
        self._host: Any = None if alone or world == 1 else torch.distributed.new_group(backend="gloo")

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.world == 1 else self._bridge.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.world == 1 else self._bridge.all_gather(x, self.world)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        if self._host is None:
            return tuple(values)
        found = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._host)
        return tuple(found.tolist())
