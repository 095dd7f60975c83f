"""Collectives of one rank group, over HCCL (gloo where the card is emulated); agreements go over the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.collectives import within
from trencadis.core.backend import BackendConfig


class HpuComm:
    """``core.backend.Comm``; layers cut the graph before they call it. A world of one does nothing.

    With several ranks the constructor is a collective: each makes the host's group.

    Args:
        alone: this process stands for all ranks, which it has no need to ask.
    """

    def __init__(self, bridge: Bridge, cfg: BackendConfig, alone: bool = False) -> None:
        self._bridge, self.rank, self.world = bridge, cfg.rank, cfg.world
        self._host: Any = None
        if alone:
            return
        if cfg.stages > 1:
            self._host = _of_stages(bridge, cfg)
        elif cfg.world > 1:
            self._host = torch.distributed.new_group(backend="gloo")

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.world == 1 else self._bridge.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.world == 1 else self._bridge.all_gather(x, self.world)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return _least(values, self._host)


class HpuPipe:
    """``core.backend.Pipe``: rows go from card to card, outside of graphs; the host's group has all ranks.

    Args:
        alone: as for ``HpuComm``; nothing is sent, and nobody is asked.
    """

    def __init__(self, bridge: Bridge, cfg: BackendConfig, alone: bool = False) -> None:
        self._bridge, self._alone = bridge, alone
        self._before, self._after = cfg.number - cfg.world, cfg.number + cfg.world
        self._host: Any = None if alone else torch.distributed.new_group(backend="gloo")

    def send(self, rows: Tensor) -> None:
        if not self._alone:
            self._bridge.mark_step()
            self._bridge.send(rows, self._after)

    def receive(self, rows: Tensor) -> None:
        if not self._alone:
            self._bridge.mark_step()
            self._bridge.receive(rows, self._before)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return _least(values, self._host)


def _of_stages(bridge: Bridge, cfg: BackendConfig) -> Any:
    """Makes the groups of all stages, as every rank must; this rank's for the card is in use from now on.

    Returns:
        The host's group of this rank's stage.
    """
    host: Any = None
    for stage in range(cfg.stages):
        members = list(range(stage * cfg.world, (stage + 1) * cfg.world))
        cards = torch.distributed.new_group(members, backend=bridge.collective_backend)
        ours = torch.distributed.new_group(members, backend="gloo")
        if stage == cfg.stage:
            within(cards)
            host = ours
    return host


def _least(values: Sequence[int], group: Any) -> tuple[int, ...]:
    if group is None:
        return tuple(values)
    found = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=group)
    return tuple(found.tolist())
