"""Collectives of one rank group, over HCCL (gloo if the card is emulated), and host-side agreement over gloo."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trencadis.backends.hpu.collectives import use_group
from trencadis.backends.hpu.habana_bridge import Bridge, join_lines
from trencadis.backends.hpu.launches.input_and_output_copies import Staging
from trencadis.backends.hpu.shape_policy import pieces
from trencadis.core.device.backend import BackendConfig

log = logging.getLogger("trencadis.engine")

SIZES = (1, 4, 16, 64, 256)
"""Numbers of rows of a piece: 341 rows of buffers in total for each tensor that is sent."""


class CopyRows(nn.Module):
    """Copies rows of ``held`` to ``buffer`` (``out``), or back; its input gives the rows."""

    def __init__(self, held: Tensor, buffer: Tensor, out: bool) -> None:
        super().__init__()
        self.held, self.buffer, self.out = held, buffer, out

    def forward(self, indices: Tensor) -> None:
        """``indices``: int32 [rows of the buffer]."""
        at = indices.long()
        if self.out:
            self.buffer.copy_(self.held.index_select(0, at))
        else:
            self.held.index_copy_(0, at, self.buffer)


class RowTransfer:
    """One tensor whose rows are sent (``out``) or received.

    Args:
        held: [rows, hidden].
        exchange: sends a buffer, or receives into it.
    """

    def __init__(
        self, bridge: Bridge, staging: Staging, held: Tensor, out: bool, exchange: Callable[[Tensor], Any]
    ) -> None:
        self._bridge, self._staging, self._out, self._exchange = bridge, staging, out, exchange
        sizes = [n for n in SIZES if n < len(held)]
        self._row_indices = {n: torch.zeros(n, dtype=torch.int32, device=bridge.device) for n in sizes}
        self._buffers = {n: torch.zeros((n, *held.shape[1:]), dtype=held.dtype, device=bridge.device) for n in sizes}
        self._launches: dict[int, Any] = {
            n: bridge.wrap_in_hpu_graph(CopyRows(held, buffer, out)) for n, buffer in self._buffers.items()
        }
        for n in sizes:
            self._launch(n, 1)

    def transfer(self, count: int) -> None:
        """Transfers rows 1 to ``count``."""
        for start, stop in pieces(count, tuple(self._buffers)):
            buffer = self._buffers[stop - start]
            if self._out:
                self._launch(stop - start, 1 + start)
                self._exchange(buffer)
            else:
                self._exchange(buffer)
                self._launch(stop - start, 1 + start)

    def _launch(self, size: int, first: int) -> None:
        """Copies ``size`` rows from ``first`` on; every size is compiled when this object is made."""
        area = self._staging.next(0)
        source = area.write(4 * size).view(torch.int32)
        source.numpy()[:] = np.arange(first, first + size, dtype=np.int32)
        self._row_indices[size].copy_(source, non_blocking=self._staging.pinned)
        area.mark_sent()
        with torch.no_grad():
            self._launches[size].forward(self._row_indices[size], bypass_hpu_graphs=True)
        self._bridge.mark_step()


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

    def check_compiled(self) -> None:
        """Keeps collectives out of compiled graphs if inside of them they fail, or are wrong, on any rank.

        Collective. Parts of the model that fail would run operation by operation, which costs far more.
        """
        if self.world == 1 or self._bridge.is_lazy() or self._opaque is not None:
            return
        why = find_fault(self._bridge, self.rank, self.world)
        if self.least((int(not why),)) == (1,):
            return
        log.warning("hpu: collectives inside of compiled graphs cannot be used (%s): they run between graphs, as with "
                    "TRENCADIS_HPU_COLLECTIVES=eager", why or "on another rank")  # fmt: skip
        self._opaque = self._bridge.opaque_collectives()

    @property
    def form(self) -> str:
        """``functional`` or ``eager`` (``hpu_settings.COLLECTIVES``): how sums run; "" in lazy mode, which has one."""
        return "" if self._bridge.is_lazy() else "functional" if self._opaque is None else "eager"

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


def find_fault(bridge: Bridge, rank: int, world: int) -> str:
    """Compiles both collectives, as parts of the model have them; returns why they cannot be used, or "".

    Collective.
    """

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return bridge.all_reduce(x * 2) + 1, bridge.all_gather(x * 3, world)

    x = torch.full((2, 4), rank + 1.0).to(bridge.device)
    try:
        with torch.no_grad(), redirect_stderr(StringIO()):  # a graph that fails prints its code
            total, rows = (found.cpu() for found in bridge.compile(run)(x))
    except Exception as error:  # whatever a release raises for a collective that it does not compile
        return f"{type(error).__name__}: {join_lines(error)}"
    wanted = (3.0 * torch.arange(1, world + 1)).repeat_interleave(4).expand(2, -1)
    right = bool((total == world * (world + 1) + 1).all()) and torch.equal(rows, wanted)
    return "" if right else "their results are wrong"


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
