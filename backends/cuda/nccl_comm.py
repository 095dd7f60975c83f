"""Collectives of one rank group over NCCL, captured as parts of launches; agreements go over the host. Small sums go
over peer memory instead where that is there and sums as NCCL does (``kernels.peers``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels.gpu_platform import in_use
from trencadis.backends.cuda.shape_policy import PEER_SUMS
from trencadis.core import envs
from trencadis.core.device.backend import BackendConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trencadis.backends.cuda.kernels.peers.symmetric_memory import PeerAllReduce
    from trencadis.backends.cuda.runtime_protocol import Graph, Runtime

_gather: Callable[..., Any] = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
"""torch 2.13 renames this function and warns about the old name."""


def _wants_peer_sums() -> bool:
    """True unless they are turned off; other cards than NVIDIA's sum over peer memory only where they are asked to."""
    return envs.get_bool(PEER_SUMS) and (in_use().runs_ptx or envs.get(PEER_SUMS) is not None)


class _GraphOfSums:
    """A graph of ``body``, which is run once before its capture, as every launch is."""

    def __init__(self, runtime: Runtime, body: Callable[[], list[Tensor]]) -> None:
        self._runtime, static = runtime, torch.zeros(1, device=runtime.device)

        def run(inputs: object) -> list[Tensor]:
            return body()

        def capture() -> Graph:
            runtime.launch("sums over ranks", run, None, static)
            runtime.synchronize()
            return runtime.capture("sums over ranks", "sums over ranks", run, None, static)

        self._graph = runtime.on_captures(capture)

    def replay(self) -> list[Tensor]:
        self._runtime.replay(self._graph)
        out: list[Tensor] = self._graph.out
        return out

    def release(self) -> None:
        self._runtime.release(self._graph)


class CudaComm:
    """``core.device.backend.Comm`` over the process group that the executor made: NCCL on cards, gloo on CPU tensors.

    With several ranks the constructor is collective: every rank of every stage joins the groups of all stages. NCCL
    sets itself up in its first collective, which cannot be captured, so that one runs here.
    """

    def __init__(self, cfg: BackendConfig, runtime: Runtime) -> None:
        device = runtime.device
        self.rank, self.world = cfg.rank, cfg.world
        self._host: ProcessGroup | None = None
        self._group: ProcessGroup | None = None  # None: the default group
        if cfg.stages == 1:
            self._host = torch.distributed.new_group(backend="gloo")
        for stage in range(cfg.stages if cfg.stages > 1 else 0):
            members = list(range(stage * cfg.world, (stage + 1) * cfg.world))
            cards, host = torch.distributed.new_group(members), torch.distributed.new_group(members, backend="gloo")
            if stage == cfg.stage:
                self._group, self._host = cards, host
        if self.world > 1:
            torch.distributed.all_reduce(torch.zeros(1, device=device), group=self._group)
        self.notes: tuple[str, ...] = ()
        self._peers: PeerAllReduce | None = None
        if self.world > 1 and device.type == in_use().name and _wants_peer_sums():
            self._open_peer_memory(cfg, runtime)

    def _open_peer_memory(self, cfg: BackendConfig, runtime: Runtime) -> None:
        from trencadis.backends.cuda.kernels.peers import symmetric_memory  # imports triton, which a twin may lack

        self._peers, why = symmetric_memory.open_peer_memory(
            self._group, self._host, self.rank, self.world, runtime.device, (cfg.dtype, torch.float32),
            lambda body: _GraphOfSums(runtime, body),
        )  # fmt: skip
        if why:
            asked = "" if envs.get(PEER_SUMS) is None else f"{PEER_SUMS}=1 has no effect: "
            self.notes = (f"{asked}small sums over ranks go over NCCL: {why}",)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks, in place or in other memory."""
        if self._peers is not None and self._peers.can_reduce(x):
            return self._peers.all_reduce(x)
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def sum_added(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Returns the sum over ranks plus ``residual``, rounded once; None if only ``all_reduce`` can sum such a
        message.
        """
        if self._peers is None or not self._peers.can_reduce(x):
            return None
        return self._peers.all_reduce(x, residual)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers [n, c] -> [n, world x c], ranks in order."""
        parts = x.new_empty(self.world, *x.shape)
        # Ranks are concatenated as rows: gloo, unlike NCCL, supports no separate axis of ranks.
        _gather(parts.flatten(0, 1), x.contiguous(), group=self._group)
        return parts.movedim(0, -2).reshape(*x.shape[:-1], self.world * x.shape[-1])

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return _least(values, self._host)


class CudaPipe:
    """``core.device.backend.Pipe``: rows go from card to card on the stream of programs, outside of graphs.

    NCCL sets a pair of ranks up in their first exchange, so one runs in the constructor.

    Args:
        in_order: (work) -> None: runs it after all launches so far and before all later ones.
    """

    def __init__(
        self, cfg: BackendConfig, device: torch.device, in_order: Callable[[Callable[[], None]], None]
    ) -> None:
        self._in_order = in_order
        self._before, self._after = cfg.number - cfg.world, cfg.number + cfg.world
        self._host = torch.distributed.new_group(backend="gloo")
        row = torch.zeros(2, device=device)
        if cfg.stage > 0:
            self.receive(row, 1)
        if cfg.stage < cfg.stages - 1:
            self.send(row, 1)

    def bind(self, stream: Tensor | None, hidden: Tensor | None) -> None:
        """Does nothing: rows need no preparation."""

    def send(self, hidden: Tensor, count: int) -> None:
        rows = hidden[1 : 1 + count]

        def work() -> None:
            torch.distributed.send(rows, self._after)

        self._in_order(work)

    def receive(self, stream: Tensor, count: int) -> None:
        rows = stream[1 : 1 + count]

        def work() -> None:
            torch.distributed.recv(rows, self._before)

        self._in_order(work)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return _least(values, self._host)


def _least(values: Sequence[int], group: ProcessGroup | None) -> tuple[int, ...]:
    found = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=group)
    return tuple(found.tolist())
