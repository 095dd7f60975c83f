"""Gated DeltaNet: a layer whose sequences keep a state of fixed size in place of keys and values.

Queries, keys and values go through a causal convolution, then through the gated delta rule, which corrects a matrix of
each head by each token. The output of a head is normed, and gated by a projection of the layer's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.layer_parts import RecurrentConfig
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.weight_source import WeightSource
from trencadis.core.device.backend import AdapterRows, Attn, Backend
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.interface import RecurrentOps, RecurrentState
from trencadis.core.models.interleaved_projections import InterleavedSource
from trencadis.core.models.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear, check_heads


class GatedDeltaNet:
    """The recurrent layer of one rank, which holds whole key heads with the value heads that they serve."""

    state: RecurrentState

    def __init__(self, backend: Backend, c: TextConfig, r: RecurrentConfig) -> None:
        ops, comm = backend.ops, backend.comm
        check_heads(r.key_heads, comm.world, "key heads of recurrent layers")
        self.ops, self.config, self.eps = ops, r, c.eps
        self.rank, self.world, self.heads = comm.rank, comm.world, r.value_heads // comm.world
        group = r.value_heads // r.key_heads * r.value_dim
        mixed = (r.key_width, r.key_dim), (r.key_width, r.key_dim), (r.value_width, group)
        self.mixed_parts = tuple(ColumnPart("", size, unit) for size, unit in mixed)
        self.qkv = ColumnParallelLinear(ops, comm, c.hidden, self.mixed_parts, fused=True)
        gates = (
            ColumnPart("in_proj_z", r.value_width, group),
            *(ColumnPart(f"in_proj_{name}", r.value_heads, r.value_heads // r.key_heads) for name in "ba"),
        )
        self.gates = ColumnParallelLinear(ops, comm, c.hidden, gates)
        self.out = RowParallelLinear(ops, comm, r.value_width, c.hidden, unit=group)
        self.sizes = [part.size // comm.world for part in self.mixed_parts]
        self.gate_sizes = [part.size // comm.world for part in gates]
        self.conv: Tensor  # [channels, kernel]
        self.norm: Tensor  # [value_dim]
        self.decay: Tensor  # float32 [heads], below 0
        self.shift: Tensor  # float32 [heads]

    def load(self, source: WeightSource, name: str) -> None:
        r, heads = self.config, self.config.value_heads
        if r.interleaved:
            source = InterleavedSource(source, r)
        self.qkv.load(source, f"{name}.in_proj_qkv")
        self.gates.load(source, name)
        self.out.load(source, f"{name}.out_proj")
        self.norm = source.take(f"{name}.norm.weight", (r.value_dim,))
        self.conv = self._load_convolution(source, f"{name}.conv1d.weight")
        part = slice(self.rank * self.heads, (self.rank + 1) * self.heads)
        self.decay = -source.take(f"{name}.A_log", (heads,)).float()[part].exp()
        self.shift = source.take(f"{name}.dt_bias", (heads,)).float()[part].clone()  # a view would keep the whole

    def _load_convolution(self, source: WeightSource, name: str) -> Tensor:
        """Returns the filters of this rank's channels: its share of the queries, of the keys and of the values."""
        whole = source.take(name, (self.config.channels(), 1, self.config.kernel))[:, 0]
        parts: Sequence[Tensor] = torch.split(whole, [part.size for part in self.mixed_parts])
        return torch.cat([part.chunk(self.world)[self.rank] for part in parts]).contiguous()

    def bind(self, state: RecurrentState) -> None:
        """Sets the tensors with the states of all sequences."""
        self.state = state

    def __call__(self, x: Tensor, rows: RecurrentRows, attn: Attn, adapters: AdapterRows | None = None) -> Tensor:
        """Computes the layer, [n, hidden] -> [n, hidden] of the backend's dtype, and updates the states of the rows.

        As in attention, the part before the output projection is a function, so that its tensors are free early.
        """
        return self.out(self._mix(x, rows, attn))

    def _mix(self, x: Tensor, rows: RecurrentRows, attn: Attn) -> Tensor:
        n, r, ops = len(x), self.config, cast(RecurrentOps, self.ops)
        assert self.state.state is not None
        mixed = ops.causal_conv(self.qkv(x), self.conv, None, self.state.conv, rows, attn, "silu")
        q, k, v = torch.split(mixed, self.sizes, dim=1)
        z, b, a = torch.split(self.gates(x), self.gate_sizes, dim=1)
        g = self.decay * functional.softplus(a.float() + self.shift)
        y = ops.delta_rule(
            q.reshape(n, -1, r.key_dim), k.reshape(n, -1, r.key_dim), v.reshape(n, -1, r.value_dim),
            g, b.float().sigmoid(), self.state.state, rows, attn,
        )  # fmt: skip
        normed = self.ops.rms_norm(y.reshape(-1, r.value_dim), self.norm, self.eps)[0]
        return (normed.view(n, -1) * functional.silu(z.float())).to(x.dtype)

    def nbytes(self) -> int:
        tensors = self.conv, self.norm, self.decay, self.shift
        return self.qkv.bytes + self.gates.bytes + self.out.bytes + sum(t.nbytes for t in tensors)
