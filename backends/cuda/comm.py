"""Collectives of one rank group over NCCL, captured as parts of launches; agreements go over the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_gather: Callable[[Tensor, Tensor], Any] = getattr(
    torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
)
"""torch 2.13 renames it and warns of the old name."""


class CudaComm:
    """``core.backend.Comm`` over the process group that the executor made: NCCL on cards, gloo on CPU tensors.

    With several ranks the constructor is collective: every rank joins the host's group. NCCL sets itself up in its
    first collective, which cannot be captured, so that one runs here.
    """

    def __init__(self, device: torch.device, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._host: Any = torch.distributed.new_group(backend="gloo")
        torch.distributed.all_reduce(torch.zeros(1, device=device))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, c] -> [n, world x c], ranks in order."""
        parts = x.new_empty(self.world, *x.shape)
        # In the shape of rows beside rows: gloo, unlike NCCL, takes no axis of ranks.
        _gather(parts.flatten(0, 1), x.contiguous())
        return parts.movedim(0, -2).reshape(*x.shape[:-1], self.world * x.shape[-1])

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        found = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._host)
        return tuple(found.tolist())
