"""Gated DeltaNet: a layer whose sequences keep a state of fixed size in place of keys and values.

Queries, keys and values go through a causal convolution, then through the gated delta rule, which corrects a matrix of
each head by each token. The output of a head is normed, and gated by a projection of the layer's input. Checkpoints may
store the projections interleaved by key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.checkpoint.decoder_layer_config import RecurrentConfig
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.checkpoint.weight_source_interface import StackedPart, WeightSource, stack
from trencadis.core.device.backend import AdapterRows, Attn, Backend
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.linear_and_embedding import ColumnParallelLinear, ColumnPart, RowParallelLinear, check_heads
from trencadis.core.models.model_and_ops_api import DeltaNetWeights, FusedDeltaOps, RecurrentOps, RecurrentState
from trencadis.core.quant.quantised_tensor import QTensor, join_weights


class StoredPart(NamedTuple):
    """A part of a stored matrix: the matrix, its rows of one key head, and the spans of the part among them."""

    stored: str
    rows: int
    spans: tuple[tuple[int, int], ...]


class InterleavedSource:
    """A source in which ``in_proj_qkvz`` and ``in_proj_ba`` are ``in_proj_qkv``, ``in_proj_z``, ``_b`` and ``_a``.

    For each key head, the stored matrices hold its query, its key, the values and the gates of the value heads that it
    serves; and the betas and the decays of these heads.
    """

    def __init__(self, source: WeightSource, r: RecurrentConfig) -> None:
        self.source, self.heads = source, r.key_heads
        group, d = r.value_heads // r.key_heads, r.key_dim
        values = 2 * d + group * r.value_dim
        wide = values + group * r.value_dim
        self._parts = {
            "in_proj_qkv": StoredPart("in_proj_qkvz", wide, ((0, d), (d, 2 * d), (2 * d, values))),
            "in_proj_z": StoredPart("in_proj_qkvz", wide, ((values, wide),)),
            "in_proj_b": StoredPart("in_proj_ba", 2 * group, ((0, group),)),
            "in_proj_a": StoredPart("in_proj_ba", 2 * group, ((group, 2 * group),)),
        }

    def _find(self, module: str) -> tuple[str, StoredPart] | None:
        """Returns the stored module of a canonical one, and what it holds; None: it is stored under its own name."""
        outer, _, name = module.rpartition(".")
        part = self._parts.get(name)
        return None if part is None else (f"{outer}.{part.stored}", part)

    def _spans(self, part: StoredPart) -> list[tuple[int, int]]:
        """Returns the stored rows of a part in canonical order: of each span, those of all key heads."""
        starts = range(0, self.heads * part.rows, part.rows)
        return [(start + a, start + b) for a, b in part.spans for start in starts]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        module, _, kind = name.rpartition(".")
        found = self._find(module)
        if found is None:
            return self.source.take(name, shape)
        stored, part = found
        whole = self.source.take(f"{stored}.{kind}", (self.heads * part.rows, *shape[1:]))
        return torch.cat([whole[a:b] for a, b in self._spans(part)])

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        if self._find(name.rpartition(".")[0]) is None:
            return self.source.shard(name, shape, dim, start, stop)
        return self.take(name, shape).narrow(dim, start, stop - start).contiguous()

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        found = self._find(name)
        if found is None:
            return self.source.take_quantised(name, shape, dim, start, stop, own)
        stored, part = found
        rows = self.heads * part.rows
        whole = self.source.take_quantised(stored, (rows, shape[1]), 0, 0, rows)
        if whole is None:
            return None
        return join_weights([whole.rows(a, b) for a, b in self._spans(part)]).rows(start, stop)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def kv_scale(self, name: str, kind: str) -> float:
        return self.source.kv_scale(name, kind)


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
        return self.out(self._mix(x, rows, attn, adapters), adapters)

    def list_linears(self) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
        """Implements ``core.models.recurrent_layers.AdaptedMixer``."""
        yield from (("in_proj_qkv", self.qkv), ("", self.gates), ("out_proj", self.out))

    @property
    def weights(self) -> DeltaNetWeights:
        """The weights besides the projections, as ``FusedDeltaOps.delta_net`` takes them."""
        heads = self.config.key_heads // self.world
        return DeltaNetWeights(self.conv, self.decay, self.shift, self.norm, self.eps, heads)

    def _mix(self, x: Tensor, rows: RecurrentRows, attn: Attn, adapters: AdapterRows | None) -> Tensor:
        n, r, ops = len(x), self.config, cast(RecurrentOps, self.ops)
        assert self.state.state is not None
        mixed, gates = self.qkv(x, adapters), self.gates(x, adapters)
        if hasattr(ops, "delta_net"):
            made = cast(FusedDeltaOps, ops).delta_net(mixed, gates, self.weights, self.state, rows, attn)
            if made is not None:
                return made
        mixed = ops.causal_conv(mixed, self.conv, None, self.state.conv, rows, attn, "silu")
        q, k, v = torch.split(mixed, self.sizes, dim=1)
        z, b, a = torch.split(gates, self.gate_sizes, dim=1)
        g = self.decay * functional.softplus(a.float() + self.shift)
        y = ops.delta_rule(
            q.reshape(n, -1, r.key_dim), k.reshape(n, -1, r.key_dim), v.reshape(n, -1, r.value_dim),
            g, b.float().sigmoid(), self.state.state, rows, attn,
        )  # fmt: skip
        return ops.gated_norm(y, self.norm, self.eps, z)

    def nbytes(self) -> int:
        tensors = self.conv, self.norm, self.decay, self.shift
        return self.qkv.bytes + self.gates.bytes + self.out.bytes + sum(t.nbytes for t in tensors)
