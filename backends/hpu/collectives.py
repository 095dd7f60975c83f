"""The collectives inside a launch, and transfers of rows between launches, over the executor's process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_stage: Any = None  # the group of the ranks of this process's stage; None: the default group, which has all ranks


def use_group(group: Any) -> None:
    """Makes later collectives run over ``group``; None: the default group."""
    global _stage
    _stage = group


def all_reduce(x: Tensor) -> Tensor:
    """Sums x over the ranks, in place."""
    torch.distributed.all_reduce(x, group=_stage)
    return x


def all_gather(x: Tensor, world: int) -> Tensor:
    """Gathers [n, width] of every rank side by side: [n, world * width]."""
    return concat_columns(gather_rows(x, world), world)


def gather_rows(x: Tensor, world: int) -> Tensor:
    """Gathers [n, width] of every rank one below the other: [world * n, width].

    Gathers into one tensor: a list of tensors would be gathered into one as well, and then copied.
    """
    found = x.new_empty(world * x.shape[0], *x.shape[1:])
    torch.distributed.all_gather_into_tensor(found, x.contiguous(), group=_stage)
    return found


def concat_columns(x: Tensor, world: int) -> Tensor:
    """Turns [world * n, width] into [n, world * width], contiguous: a view would have other strides."""
    return x.view(world, -1, x.shape[-1]).transpose(0, 1).reshape(-1, world * x.shape[-1]).contiguous()


_library: Any = None


def _register() -> None:
    """Registers the operations once per process; called before anything is compiled."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("trencadis_hpu", "DEF")  # type: ignore[no-untyped-call]
    _library.define("all_reduce(Tensor x) -> Tensor")
    _library.define("gather_rows(Tensor x, int world) -> Tensor")
    _library.impl("all_reduce", lambda x: all_reduce(x.clone()), "CompositeExplicitAutograd")
    _library.impl("gather_rows", gather_rows, "CompositeExplicitAutograd")
    _library.impl("all_reduce", torch.empty_like, "Meta")
    _library.impl("gather_rows", lambda x, world: x.new_empty(world * x.shape[0], *x.shape[1:]), "Meta")


def register_opaque() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]:
    """Returns (all_reduce, all_gather) as operations that Dynamo does not look into; registers them at the first call.

    Dynamo makes ``torch.distributed.all_reduce`` of a compiled part into a functional collective; these bypass that.
    """
    _register()
    return torch.ops.trencadis_hpu.all_reduce, _gather_opaque


def _gather_opaque(x: Tensor, world: int) -> Tensor:
    return concat_columns(torch.ops.trencadis_hpu.gather_rows(x, world), world)


def send(x: Tensor, to: int) -> Tensor:
    """Sends x [n, width] to rank ``to`` of the default group, after all launches so far."""
    torch.distributed.send(x, to)
    return x


def receive(x: Tensor, source: int) -> Tensor:
    """Receives x [n, width] from rank ``source``, before later launches."""
    torch.distributed.recv(x, source)
    return x
