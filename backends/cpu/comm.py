"""Collectives among ranks over gloo; sums add in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trencadis.core.backend import BackendConfig
from trencadis.core.executor.groups import TIMEOUT, store_of


class SingleRank:
    """Collectives of a world of one."""

    rank = 0
    world = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)


class GlooComm:
    """``core.backend.Comm`` over a group of its own, so that one process may hold several engines.

    Sums gather the parts and add them in the order of the ranks, so that every rank gets the same bits and the bits of
    a row do not depend on its place in the batch. A ring adds the parts of a tensor in different orders.
    """

    def __init__(self, cfg: BackendConfig) -> None:
        self.rank, self.world = cfg.rank, cfg.world
        c10d: Any = torch.distributed
        self._group = c10d.ProcessGroupGloo(store_of(cfg), cfg.rank, cfg.world, TIMEOUT)

    def _parts(self, x: Tensor) -> list[Tensor]:
        """``x`` of every rank, sent as bytes, because gloo lacks some dtypes."""
        own = x.contiguous().view(torch.uint8)
        found = own.new_empty(self.world, *own.shape)
        self._group.allgather([list(found)], [own]).wait()
        return list(found.view(x.dtype))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks; 16-bit types are added in float32."""
        parts = self._parts(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total.add_(part)
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, width] of every rank side by side: [n, world * width]."""
        return torch.cat(self._parts(x), dim=-1)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """The smallest of each value."""
        found = self._parts(torch.tensor(values, dtype=torch.int64))
        return tuple(torch.stack(found).amin(0).tolist())


def comm_of(cfg: BackendConfig) -> SingleRank | GlooComm:
    """The collectives of a rank; with several ranks it returns once all of them have called it."""
    return SingleRank() if cfg.world == 1 else GlooComm(cfg)
