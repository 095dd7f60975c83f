"""The recurrent layers that are not gated DeltaNet: LFM2's short convolution, and Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Attn, Backend
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.gated_delta import GatedDeltaNet
from trencadis.core.models.linear_and_embedding import ColumnParallelLinear, ColumnPart, RowParallelLinear, check_heads
from trencadis.core.models.model_and_ops_api import RecurrentOps, RecurrentState, StatefulLayer


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


class Mamba2:
    """The layer of one rank, which holds whole groups of heads: a convolution, a state space, a gated norm by group.

    One projection makes a gate, the convolution's inputs (x, B and C) and the steps.
    """

    state: RecurrentState

    def __init__(self, backend: Backend, c: TextConfig, r: RecurrentConfig) -> None:
        ops, comm = backend.ops, backend.comm
        check_heads(r.key_heads, comm.world, f"{r.unit_name} of recurrent layers")
        self.ops, self.config, self.eps = ops, r, c.eps
        self.rank, self.world = comm.rank, comm.world
        group = r.value_heads // r.key_heads
        self.mixed_parts = (
            ColumnPart("", r.value_width, group * r.value_dim), *(ColumnPart("", r.key_width, r.key_dim),) * 2
        )  # fmt: skip
        parts = self.mixed_parts[0], *self.mixed_parts, ColumnPart("", r.value_heads, group)
        self.inputs = ColumnParallelLinear(ops, comm, c.hidden, parts, bias=r.projection_bias, fused=True)
        self.out = RowParallelLinear(
            ops, comm, r.value_width, c.hidden, unit=group * r.value_dim, bias=r.projection_bias
        )  # fmt: skip
        self.sizes = [r.value_width // comm.world, r.channels(comm.world), r.value_heads // comm.world]
        self.filters: Tensor  # [channels, kernel]
        self.bias: Tensor | None = None  # [channels]
        self.norm: Tensor  # [values of this rank]
        self.decay: Tensor  # float32 [heads], below 0
        self.shift: Tensor  # float32 [heads]
        self.skip: Tensor  # float32 [heads]

    def load(self, source: WeightSource, name: str) -> None:
        r = self.config
        self.inputs.load(source, f"{name}.in_proj")
        self.out.load(source, f"{name}.out_proj")
        self.filters = self._own(source.take(f"{name}.conv1d.weight", (r.channels(), 1, r.kernel))[:, 0])
        if r.conv_bias:
            self.bias = self._own(source.take(f"{name}.conv1d.bias", (r.channels(),)))
        self.norm = source.take(f"{name}.norm.weight", (r.value_width,)).chunk(self.world)[self.rank].clone()
        decay, self.shift, self.skip = (
            source.take(f"{name}.{one}", (r.value_heads,)).float().chunk(self.world)[self.rank].clone()
            for one in ("A_log", "dt_bias", "D")
        )
        self.decay = -decay.exp()

    def _own(self, whole: Tensor) -> Tensor:
        """Returns the rows of this rank's channels: its share of the values, of the keys and of the queries."""
        parts: Sequence[Tensor] = torch.split(whole, [part.size for part in self.mixed_parts])
        return torch.cat([part.chunk(self.world)[self.rank] for part in parts]).contiguous()

    def bind(self, state: RecurrentState) -> None:
        """Sets the tensors with the states of all sequences."""
        self.state = state

    def __call__(self, x: Tensor, rows: RecurrentRows, attn: Attn, adapters: AdapterRows | None = None) -> Tensor:
        """Computes the layer, [n, hidden] -> [n, hidden] of the backend's dtype, and updates the states of the rows."""
        return self.out(self._mix(x, rows, attn))

    def _mix(self, x: Tensor, rows: RecurrentRows, attn: Attn) -> Tensor:
        n, r, ops = len(x), self.config, cast(RecurrentOps, self.ops)
        assert self.state.state is not None
        z, inner, dt = torch.split(self.inputs(x), self.sizes, dim=1)
        inner = ops.causal_conv(inner, self.filters, self.bias, self.state.conv, rows, attn, "silu")
        keys = r.key_width // self.world
        values, b, c = torch.split(inner, [self.sizes[0], keys, keys], dim=1)
        step, values = functional.softplus(dt.float() + self.shift), values.reshape(n, -1, r.value_dim)
        y = ops.state_space(
            c.reshape(n, -1, r.key_dim), b.reshape(n, -1, r.key_dim), values, self.decay * step, step,
            self.state.state, rows, attn,
        )  # fmt: skip
        gated = (y.float() + values.float() * self.skip[:, None]).reshape(n, -1) * functional.silu(z.float())
        grouped = gated.reshape(n, r.key_heads // self.world, -1)
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return normed.reshape(n, -1).to(x.dtype) * self.norm

    def nbytes(self) -> int:
        tensors = self.filters, self.bias, self.norm, self.decay, self.shift, self.skip
        return self.inputs.bytes + self.out.bytes + sum(t.nbytes for t in tensors if t is not None)


def make_recurrent_layer(backend: Backend, c: TextConfig, r: RecurrentConfig) -> StatefulLayer:
    """Returns the layer that a configuration describes."""
    kind = ShortConvolution if r.width else Mamba2 if r.scan else GatedDeltaNet
    return kind(backend, c, r)
