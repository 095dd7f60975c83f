"""The short convolution of LFM2: gates before and behind a causal convolution over a few tokens."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from trencadis.core.checkpoint.layer_parts import RecurrentConfig
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import Attn, Backend
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.interface import RecurrentOps, RecurrentState
from trencadis.core.models.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear


class ShortConvolution:
    """The layer in the place of attention; each rank has a share of the channels."""

    state: RecurrentState
    filters: Tensor  # [channels, kernel]

    def __init__(self, backend: Backend, c: TextConfig, r: RecurrentConfig) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.config, self.rank, self.world = ops, r, comm.rank, comm.world
        parts = tuple(ColumnPart("", r.width, 1) for _ in range(3))
        self.inputs = ColumnParallelLinear(ops, comm, c.hidden, parts, fused=True)
        self.out = RowParallelLinear(ops, comm, r.width, c.hidden)

    def load(self, source: WeightSource, name: str) -> None:
        r = self.config
        self.inputs.load(source, f"{name}.in_proj")
        self.out.load(source, f"{name}.out_proj")
        whole = source.take(f"{name}.conv.weight", (r.width, 1, r.kernel))[:, 0]
        self.filters = whole.chunk(self.world)[self.rank].contiguous()

    def bind(self, state: RecurrentState) -> None:
        """Sets the tensors with the last inputs of all sequences."""
        self.state = state

    def __call__(self, x: Tensor, rows: RecurrentRows, attn: Attn, adapters: object = None) -> Tensor:
        """Computes [n, hidden] -> [n, hidden]; reads and replaces the last inputs of each row's sequence."""
        before, behind, x = self.inputs(x).chunk(3, dim=1)
        ops = cast(RecurrentOps, self.ops)
        mixed = ops.causal_conv(before * x, self.filters, None, self.state.conv, rows, attn, "")
        return self.out(behind * mixed)

    def nbytes(self) -> int:
        return self.inputs.bytes + self.out.bytes + self.filters.nbytes


class Lfm2(Decoder):
    """The decoder with this layer where ``TextConfig.recurrent`` says so."""

    recurrent_layer = ShortConvolution


def make(config: ModelConfig, backend: Backend) -> Lfm2:
    """Builds the model; named in the family's record."""
    return Lfm2(config, backend)
