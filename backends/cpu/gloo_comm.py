"""Communication between ranks over gloo: sums in the order of the ranks, and rows between stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.core.device.backend import BackendConfig
from trencadis.core.device.communicators_and_rank_agreement import SingleRank as SingleRank
from trencadis.core.executor.rendezvous import TIMEOUT, open_store


class GlooComm:
    """Implements ``core.device.backend.Comm`` over a group of its own, so that one process may hold several engines.

    Sums gather the parts and add them in the order of the ranks, so that every rank gets the same bits and the bits of
    a row do not depend on its index in the batch. A ring adds the parts of a tensor in different orders.

    Args:
        everyone: True for a group of all ranks of all stages, False for the ranks of one stage.
    """

    def __init__(self, cfg: BackendConfig, everyone: bool = False) -> None:
        c10d: Any = torch.distributed
        store = open_store(cfg)
        if everyone or cfg.stages == 1:
            self.rank, self.world = cfg.number, cfg.ranks
        else:
            self.rank, self.world = cfg.rank, cfg.world
            store = c10d.PrefixStore(f"stage {cfg.stage}", store)
        self.group = c10d.ProcessGroupGloo(store, self.rank, self.world, TIMEOUT)

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Returns ``x`` of every rank, sent as bytes, because gloo lacks some dtypes."""
        own = x.contiguous().view(torch.uint8)
        found = own.new_empty(self.world, *own.shape)
        self.group.allgather([list(found)], [own]).wait()
        return list(found.view(x.dtype))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of ``x`` over the ranks; 16-bit types are added in float32."""
        parts = self._parts(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total.add_(part)
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers [n, width] of every rank side by side: [n, world * width]."""
        return torch.cat(self._parts(x), dim=-1)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """Returns the minimum of each value over the ranks."""
        found = self._parts(torch.tensor(values, dtype=torch.int64))
        return tuple(torch.stack(found).amin(0).tolist())


class GlooPipe:
    """Implements the backend's ``Pipe`` over gloo: ``send`` copies the rows and returns while they are transferred."""

    def __init__(self, cfg: BackendConfig) -> None:
        self._everyone = GlooComm(cfg, everyone=True)
        self._group = self._everyone.group
        self._before, self._after, self._stages = cfg.number - cfg.world, cfg.number + cfg.world, cfg.stages
        self._leaving: deque[PendingSend] = deque()

    def bind(self, stream: Tensor | None, hidden: Tensor | None) -> None:
        """Does nothing: rows need no preparation."""

    def send(self, hidden: Tensor, count: int) -> None:
        """Sends ``count`` rows; waits only if more sends are pending than there are stages."""
        while self._leaving and (len(self._leaving) > self._stages or self._leaving[0].work.is_completed()):
            self._leaving.popleft().work.wait()
        copy = hidden[1 : 1 + count].contiguous().view(torch.uint8).clone()
        self._leaving.append(PendingSend(copy, self._group.send([copy], self._after, 0)))

    def receive(self, stream: Tensor, count: int) -> None:
        """Waits for ``count`` rows and writes them to ``stream``."""
        self._group.recv([stream[1 : 1 + count].view(torch.uint8)], self._before, 0).wait()

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return self._everyone.least(values)


class PendingSend(NamedTuple):
    """A pending send; keeps its rows alive until the transfer is done."""

    rows: Tensor
    work: Any


def make_comm(cfg: BackendConfig) -> SingleRank | GlooComm:
    """Makes the communicator of a stage's rank; with several ranks it returns once all of them have called it."""
    return SingleRank() if cfg.world == 1 else GlooComm(cfg)


def make_pipe(cfg: BackendConfig) -> GlooPipe | None:
    """Makes a rank's links to other stages, if there are any; returns once all ranks have called it."""
    return None if cfg.stages == 1 else GlooPipe(cfg)
