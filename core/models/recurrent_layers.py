"""The recurrent layers that are not gated DeltaNet: LFM2's short convolution."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from trencadis.core.checkpoint.layer_parts import RecurrentConfig
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import AdapterRows, Attn, Backend
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.gated_delta import GatedDeltaNet
from trencadis.core.models.interface import RecurrentOps, RecurrentState, StatefulLayer
from trencadis.core.models.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear, check_heads


class ShortConvolution:
    """LFM2's layer in the place of attention: a causal convolution between two gates; ranks share its channels."""

    state: RecurrentState
    filters: Tensor  # [channels of this rank, kernel]

    def __init__(self, backend: Backend, c: TextConfig, r: RecurrentConfig) -> None:
        ops, comm = backend.ops, backend.comm
        check_heads(r.width, comm.world, "channels of recurrent layers")
        self.ops, self.config, self.rank, self.world = ops, r, comm.rank, comm.world
        self.inputs = ColumnParallelLinear(ops, comm, c.hidden, (ColumnPart("", r.width, 1),) * 3, fused=True)
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

    def __call__(self, x: Tensor, rows: RecurrentRows, attn: Attn, adapters: AdapterRows | None = None) -> Tensor:
        """Computes the layer, [n, hidden] -> [n, hidden] of the backend's dtype, and updates the states of the rows."""
        return self.out(self._mix(x, rows, attn))

    def _mix(self, x: Tensor, rows: RecurrentRows, attn: Attn) -> Tensor:
        before, behind, inner = self.inputs(x).chunk(3, dim=1)
        ops = cast(RecurrentOps, self.ops)
        return behind * ops.causal_conv(before * inner, self.filters, None, self.state.conv, rows, attn, "")

    def nbytes(self) -> int:
        return self.inputs.bytes + self.out.bytes + self.filters.nbytes


def make_recurrent_layer(backend: Backend, c: TextConfig, r: RecurrentConfig) -> StatefulLayer:
    """Returns the layer that a configuration describes."""
    return ShortConvolution(backend, c, r) if r.width else GatedDeltaNet(backend, c, r)
