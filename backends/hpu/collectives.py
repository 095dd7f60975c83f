"""The collectives inside a launch and the rows between them, over the process group that the executor made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_stage: Any = None  # of this process: the ranks that share layers; None: the default group, which has all ranks


def within(group: Any) -> None:
    """From now on the collectives are those of ``group``."""
    global _stage
    _stage = group


def all_reduce(x: Tensor) -> Tensor:
    """The sum over the ranks, in place."""
    torch.distributed.all_reduce(x, group=_stage)
    return x


def all_gather(x: Tensor, world: int) -> Tensor:
    """[n, width] of every rank side by side: [n, world * width]."""
    parts = [torch.empty_like(x) for _ in range(world)]
    torch.distributed.all_gather(parts, x, group=_stage)
    return torch.cat(parts, dim=-1)


def send(x: Tensor, to: int) -> Tensor:
    """Sends x [n, width] to rank ``to`` of the default group, behind the launches so far."""
    torch.distributed.send(x, to)
    return x


def receive(x: Tensor, source: int) -> Tensor:
    """Fills x [n, width] with what rank ``source`` sends, before later launches."""
    torch.distributed.recv(x, source)
    return x
