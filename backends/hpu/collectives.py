"""The collectives inside a launch and the rows between them, over the process group that the executor made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_stage: Any = None  # of this process: the ranks that share layers; None: the default group, which has all ranks


def use_group(group: Any) -> None:
    """From now on the collectives are those of ``group``."""
    global _stage
    _stage = group


def all_reduce(x: Tensor) -> Tensor:
    """The sum over the ranks, in place."""
    torch.distributed.all_reduce(x, group=_stage)
    return x


def all_gather(x: Tensor, world: int) -> Tensor:
    """[n, width] of every rank side by side: [n, world * width]."""
    return concat_columns(gather_rows(x, world), world)


def gather_rows(x: Tensor, world: int) -> Tensor:
    """[n, width] of every rank one below the other: [world * n, width].

    Into one tensor: a list of tensors would be gathered into one all the same, and copied from there.
    """
    found = x.new_empty(world * x.shape[0], *x.shape[1:])
    torch.distributed.all_gather_into_tensor(found, x.contiguous(), group=_stage)
    return found


def concat_columns(x: Tensor, world: int) -> Tensor:
    """[world * n, width] -> [n, world * width], contiguous: columns of one value would be a view with other strides."""
    return x.view(world, -1, x.shape[-1]).transpose(0, 1).reshape(-1, world * x.shape[-1]).contiguous()


def send(x: Tensor, to: int) -> Tensor:
    """Sends x [n, width] to rank ``to`` of the default group, behind the launches so far."""
    torch.distributed.send(x, to)
    return x


def receive(x: Tensor, source: int) -> Tensor:
    """Fills x [n, width] with what rank ``source`` sends, before later launches."""
    torch.distributed.recv(x, source)
    return x
