"""The state space of Bamba: a gate, a causal convolution, a scan with a matrix for each head, and a norm."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.model_config import ModelConfig, TextConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import Attn, Backend
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.decoder import Decoder
from trencadis.core.models.linear_and_embedding import ColumnParallelLinear, ColumnPart, RowParallelLinear
from trencadis.core.models.model_and_ops_api import RecurrentOps, RecurrentState


class StateSpace:
    """The layer in the place of attention, on one rank."""

    state: RecurrentState

    def __init__(self, backend: Backend, c: TextConfig, r: RecurrentConfig) -> None:
        ops, comm = backend.ops, backend.comm
        self.ops, self.config, self.eps = ops, r, c.eps
        self.sizes = [r.value_width, r.channels(), r.value_heads]
        parts = tuple(ColumnPart("", size, size) for size in self.sizes)
        self.inputs = ColumnParallelLinear(ops, comm, c.hidden, parts, fused=True)
        self.out = RowParallelLinear(ops, comm, r.value_width, c.hidden)

    def load(self, source: WeightSource, name: str) -> None:
        r = self.config
        self.inputs.load(source, f"{name}.in_proj")
        self.out.load(source, f"{name}.out_proj")
        self.filters = source.take(f"{name}.conv1d.weight", (r.channels(), 1, r.kernel))[:, 0].contiguous()
        self.bias = source.take(f"{name}.conv1d.bias", (r.channels(),))
        self.norm = source.take(f"{name}.norm.weight", (r.value_width,))
        self.decay = -source.take(f"{name}.A_log", (r.value_heads,)).float().exp()
        self.shift = source.take(f"{name}.dt_bias", (r.value_heads,)).float()
        self.skip = source.take(f"{name}.D", (r.value_heads,)).float()

    def bind(self, state: RecurrentState) -> None:
        """Sets the tensors with the last inputs and the matrices of all sequences."""
        self.state = state

    def __call__(self, x: Tensor, rows: RecurrentRows, attn: Attn, adapters: object = None) -> Tensor:
        """Computes [n, hidden] -> [n, hidden]; reads and replaces the state of each row's sequence."""
        r, ops = self.config, cast(RecurrentOps, self.ops)
        assert self.state.state is not None
        z, mixed, dt = torch.split(self.inputs(x), self.sizes, dim=1)
        mixed = ops.causal_conv(mixed, self.filters, self.bias, self.state.conv, rows, attn, "silu")
        values, b, c = torch.split(mixed, [r.value_width, r.key_dim, r.key_dim], dim=1)
        step, values = functional.softplus(dt.float() + self.shift), values.reshape(len(x), -1, r.value_dim)
        y = ops.state_space(
            c[:, None], b[:, None], values, self.decay * step, step, self.state.state, rows, attn
        )  # fmt: skip
        gated = (y.float() + self.skip[:, None] * values).flatten(1) * functional.silu(z.float())
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return self.out(normed.to(x.dtype) * self.norm)

    def nbytes(self) -> int:
        own = self.filters, self.bias, self.norm, self.decay, self.shift, self.skip
        return self.inputs.bytes + self.out.bytes + sum(t.nbytes for t in own)


class Bamba(Decoder):
    """The decoder with this layer where ``TextConfig.recurrent`` says so."""

    recurrent_layer = StateSpace


def make(config: ModelConfig, backend: Backend) -> Bamba:
    """Builds the model; named in the family's record."""
    return Bamba(config, backend)
