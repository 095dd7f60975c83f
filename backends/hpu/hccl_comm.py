"""Collectives of one rank group, over HCCL (gloo if the card is emulated), and host-side agreement over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.hpu.bridge import Bridge
from trencadis.backends.hpu.collectives import use_group
from trencadis.backends.hpu.launches.host_copies import Staging
from trencadis.backends.hpu.launches.row_transfer import RowTransfer
from trencadis.core.device.backend import BackendConfig


class HpuComm:
    """``core.device.backend.Comm`` over HCCL; layers cut the graph before they call it. With one rank it does nothing.

    With several ranks the constructor is a collective: each makes the host's group.

    Args:
        alone: True if this process simulates all ranks, so that nothing is sent.
        opaque: compile mode: collectives are operations of their own, which Dynamo does not look into.
    """

    def __init__(self, bridge: Bridge, cfg: BackendConfig, alone: bool = False, opaque: bool = False) -> None:
        self._bridge, self.rank, self.world = bridge, cfg.rank, cfg.world
        self._opaque: Any = bridge.opaque_collectives() if opaque and cfg.world > 1 and not bridge.is_lazy() else None
        self._host: Any = None
        if alone:
            return
        if cfg.stages > 1:
            self._host = _stage_group(bridge, cfg)
        elif cfg.world > 1:
            use_group(None)  # an earlier pipeline engine in this process may have set a group
            self._host = torch.distributed.new_group(backend="gloo")

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x
        found: Tensor = self._bridge.all_reduce(x) if self._opaque is None else self._opaque[0](x)
        return found

    def all_gather(self, x: Tensor) -> Tensor:
        if self.world == 1:
            return x
        gather = self._bridge.all_gather if self._opaque is None else self._opaque[1]
        found: Tensor = gather(x, self.world)
        return found

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return _least(values, self._host)


class HpuPipe:
    """``core.device.backend.Pipe``: rows go from card to card, outside of graphs; the host's group has all ranks.

    Args:
        alone: as for ``HpuComm``; nothing is sent.
    """

    def __init__(self, bridge: Bridge, cfg: BackendConfig, staging: Staging, alone: bool = False) -> None:
        self._bridge, self._staging, self._alone = bridge, staging, alone
        self._in: RowTransfer | None = None
        self._out: RowTransfer | None = None
        self._before, self._after = cfg.number - cfg.world, cfg.number + cfg.world
        self._host: Any = None if alone else torch.distributed.new_group(backend="gloo")

    def bind(self, stream: Tensor | None, hidden: Tensor | None) -> None:
        """Sets the tensors whose rows are transferred. In lazy mode makes their buffers and compiles the launches that
        fill them.
        """
        if self._alone or not self._bridge.is_lazy():
            return
        if stream is not None:
            self._in = RowTransfer(self._bridge, self._staging, stream, False, self._receive_rows)
        if hidden is not None:
            self._out = RowTransfer(self._bridge, self._staging, hidden, True, self._send_rows)

    def send(self, hidden: Tensor, count: int) -> None:
        if self._out is not None:
            self._out.transfer(count)
        elif not self._alone:
            self._send_rows(hidden[1 : 1 + count])

    def receive(self, stream: Tensor, count: int) -> None:
        if self._in is not None:
            self._in.transfer(count)
        elif not self._alone:
            self._receive_rows(stream[1 : 1 + count])

    def _send_rows(self, rows: Tensor) -> None:
        self._bridge.mark_step()
        self._bridge.send(rows, self._after)

    def _receive_rows(self, rows: Tensor) -> None:
        self._bridge.mark_step()
        self._bridge.receive(rows, self._before)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return _least(values, self._host)


def _stage_group(bridge: Bridge, cfg: BackendConfig) -> Any:
    """Makes the groups of all stages, as every rank must, and sets this rank's group for the card's collectives.

    Returns:
        The host's group of this rank's stage.
    """
    host: Any = None
    for stage in range(cfg.stages):
        members = list(range(stage * cfg.world, (stage + 1) * cfg.world))
        cards = torch.distributed.new_group(members, backend=bridge.collective_backend)
        ours = torch.distributed.new_group(members, backend="gloo")
        if stage == cfg.stage:
            use_group(cards)
            host = ours
    return host


def _least(values: Sequence[int], group: Any) -> tuple[int, ...]:
    if group is None:
        return tuple(values)
    found = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=group)
    return tuple(found.tolist())
