"""Experts in the place of an MLP: a router, and gated MLPs whose columns are divided over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.backend import Comm, ExpertWeights, Ops
from trencadis.core.checkpoint.model_config import ExpertsConfig
from trencadis.core.layers.linear import Linear, pad_rows, span
from trencadis.core.layers.source import Source


class ExpertMLP:
    """Every rank routes alike and holds a share of each expert, with zero padding if it does not divide evenly."""

    weights: ExpertWeights

    def __init__(self, ops: Ops, comm: Comm, width: int, c: ExpertsConfig, act: str = "silu") -> None:
        self.ops, self.comm, self.width, self.act = ops, comm, width, act
        self.count, self.top, self.inner, self.normalise = c.count, c.top, c.inner, c.normalise
        self.router = Linear(ops, comm)
        self.bytes = 0

    def load(self, source: Source, name: str) -> None:
        self.router.pack(source.take(f"{name}.gate.weight", (self.count, self.width)), None)
        each = [self._expert(source, f"{name}.experts.{i}") for i in range(self.count)]
        self.bytes = sum(gate_up.nbytes + down.nbytes for gate_up, down in each)
        self.weights = self.ops.pack_experts([gate_up for gate_up, _ in each], [down for _, down in each])

    def _expert(self, source: Source, name: str) -> tuple[Tensor, Tensor]:
        """This rank's gate_up [2 x share, width] and down [width, share]."""
        start, stop, share = span(self.inner, self.comm.rank, self.comm.world)
        cut = [source.shard(f"{name}.{part}.weight", (self.inner, self.width), 0, start, stop) for part in GATED]
        down = source.shard(f"{name}.down_proj.weight", (self.width, self.inner), 1, start, stop)
        return torch.cat([pad_rows(one, share) for one in cut]), functional.pad(down, (0, share - (stop - start)))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, width] -> [n, width] in the backend's dtype, summed over ranks."""
        y = self.ops.experts(x, self.router(x), self.weights, self.top, self.normalise, self.act)
        if self.comm.world == 1:
            return y
        self.ops.cut("collective")
        return self.comm.all_reduce(y)

    def nbytes(self) -> int:
        return self.router.bytes + self.bytes


GATED = ("gate_proj", "up_proj")
