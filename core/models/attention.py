"""Causal self-attention over the paged cache, with grouped KV heads and optional norms of q and k.

Partly rotated heads: reorders the values of q and k as rotary ops expect them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import RMS_ONE, TextConfig
from trencadis.core.checkpoint.weight_source import StackedPart, StoredRows, WeightSource, stack
from trencadis.core.device.backend import AdapterRows, Attn, Backend, LayerKV, Rotary, SinksArgument
from trencadis.core.kv_cache_format import KVFormat
from trencadis.core.models.kv_cache_codes import pairs_of, static_of
from trencadis.core.models.linear import (
    ColumnParallelLinear,
    ColumnPart,
    RowParallelLinear,
    check_heads,
    pad_rows,
    unit_span,
)
from trencadis.core.models.norm import RMSNorm
from trencadis.core.quant.quantised_tensor import QTensor, join_weights


class HeadSpan(NamedTuple):
    """Values [start, stop) of a head."""

    start: int
    stop: int


ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")


def rotated_spans(head_dim: int, rotary_dim: int, adjacent: bool) -> tuple[HeadSpan, ...]:
    """Returns the spans of a head's stored values in the order that rotary ops expect; ``adjacent``: as in
    ``PartialRotarySource``.
    """
    middle, half = rotary_dim + (head_dim - rotary_dim) // 2, rotary_dim // 2
    first, second = [HeadSpan(0, half)], [HeadSpan(half, rotary_dim)]
    if adjacent:
        first, second = ([HeadSpan(i, i + 1) for i in range(start, rotary_dim, 2)] for start in range(2))
    return (*first, HeadSpan(rotary_dim, middle), *second, HeadSpan(middle, head_dim))


def reorder_heads(rows: Tensor, head_dim: int, spans: Sequence[HeadSpan]) -> Tensor:
    """Returns rows [whole heads, ...] with the ``spans`` of each head, one after the other."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    return torch.cat([heads[:, a:b] for a, b in spans], 1).reshape(rows.shape)


class PartialRotarySource:
    """Wraps a source and moves the rotated values of a head, stored at its start, to the start of each half.

    Rotary ops rotate the first half of a head against the second. Scores are sums over a head's values, so that any
    order is valid if q and k share it, and the weights of their norms as well.

    Args:
        rotary_dim: number of rotated values of a head.
        adjacent: True if the two values of a rotated pair are stored next to each other.
        gated: True if each query head is followed by its output gate, which stays in the order of v.
    """

    def __init__(
        self, source: WeightSource, head_dim: int, rotary_dim: int, adjacent: bool = False, gated: bool = False
    ) -> None:
        self.source, self.head_dim, self.gated = source, head_dim, gated
        self.spans = rotated_spans(head_dim, rotary_dim, adjacent)

    def _reorder(self, name: str, part: Tensor) -> Tensor:
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module not in ROTATED:
            return part
        spans = self._spans(module)
        return reorder_heads(part, spans[-1].stop, spans)

    def _spans(self, module: str) -> tuple[HeadSpan, ...]:
        """Returns the order in which the rows of a head are taken, and of its gate if it has one."""
        gated = self.gated and module == "q_proj"
        return (*self.spans, HeadSpan(self.head_dim, 2 * self.head_dim)) if gated else self.spans

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._reorder(name, self.source.take(name, shape))

    def shard(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        return self._reorder(name, self.source.shard(name, shape, dim, start, stop))

    def take_stacked(self, parts: Sequence[StackedPart], inputs: int) -> Tensor:
        return stack(self, parts, inputs)

    def stored(self, parts: Sequence[StackedPart], inputs: int, start: int, stop: int) -> StoredRows | None:
        give = getattr(self.source, "stored", None)
        rotates = any(part.name.rpartition(".")[0].rpartition(".")[2] in ROTATED for part in parts)
        found: StoredRows | None = None if rotates or give is None else give(parts, inputs, start, stop)
        return found

    def take_quantised(
        self, name: str, shape: tuple[int, int], dim: int, start: int, stop: int, own: str = ""
    ) -> QTensor | None:
        found = self.source.take_quantised(name, shape, dim, start, stop, own)
        module = name.rpartition(".")[2]
        if found is None or module not in ROTATED:
            return found
        spans = self._spans(module)
        heads = range(0, stop - start, spans[-1].stop)
        return join_weights([found.rows(head + a, head + b) for head in heads for a, b in spans])

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def kv_scale(self, name: str, kind: str) -> float:
        return self.source.kv_scale(name, kind)


class SharedAttention(NamedTuple):
    """The output of attention, [n, hidden], and the keys and values of the launch, [n, KV heads, d] each."""

    out: Tensor
    k: Tensor
    v: Tensor


class ProjectedHeads(NamedTuple):
    """Queries [n, h, d], keys and values [n, g, d], and the gate of the output, [n, h * d] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None


class Attention:
    """The attention layer: fused qkv, head norms, rotary embedding and KV store, attention, output projection."""

    kv: LayerKV
    pairs: Tensor | None = None
    static: Tensor | None = None

    def __init__(self, backend: Backend, c: TextConfig, window: int = 0, scale: float = 0.0) -> None:
        comm, d = backend.comm, c.head_dim
        check_heads(c.heads, comm.world, "query heads")
        self.ops, self.kv_format, self.bias = backend.ops, c.kv, c.qkv_bias
        self.head_dim, self.scale = d, scale or c.score_scale
        self.rotary_dim, self.adjacent = c.rotary_dim or (d if c.adjacent_pairs else 0), c.adjacent_pairs
        self.window = (window,) if window else ()
        self.scales_queries, self.has_sinks = c.query_growth is not None, c.sinks
        self.sinks: SinksArgument = {}
        self.gated, q = c.output_gate, c.query_width
        self.keys_as_values = c.keys_as_values
        self.reads_kv = c.reads_kv
        stored = ("k_proj", "v_proj")[: c.key_parts]
        parts = ColumnPart("q_proj", c.heads * q, q), *(ColumnPart(n, c.kv_heads * d, d) for n in stored)
        self.qkv = ColumnParallelLinear(self.ops, comm, c.hidden, parts, bias=c.qkv_bias)
        self.out = RowParallelLinear(self.ops, comm, c.heads * d, c.hidden, unit=d, bias=c.out_bias)
        self.sizes = [unit_span(part.size, part.unit, comm.rank, comm.world).width for part in parts]
        self.heads = self.sizes[0] // q
        self.query_heads = (c.heads, *unit_span(c.heads, 1, comm.rank, comm.world))
        self.keys = (c.kv_heads * d, *unit_span(c.kv_heads * d, d, comm.rank, comm.world))
        self.device, self.values, self.dtype = backend.device, backend.values, backend.dtype
        above_one = c.norm == RMS_ONE
        normed = "q" if c.reads_kv else "qk"
        self.norms = tuple(RMSNorm(self.ops, d, c.eps, above_one) for _ in normed) if c.qk_norm else None
        self.v_norm = RMSNorm(self.ops, d, c.eps) if c.v_norm and not c.reads_kv else None
        self.joint_norms: tuple[RMSNorm, ...] = ()
        if c.joint_qk_norm:
            assert comm.world == 1, "the norms of q and k go over all heads, which ranks cannot share"
            self.joint_norms = tuple(RMSNorm(self.ops, heads * d, c.eps, above_one) for heads in (c.heads, c.kv_heads))

    def load(self, source: WeightSource, name: str) -> None:
        if self.rotary_dim:
            source = PartialRotarySource(source, self.head_dim, self.rotary_dim, self.adjacent, self.gated)
        self.qkv.load(source, name)
        self.out.load(source, f"{name}.o_proj")
        if self.has_sinks:
            size, start, stop, width = self.query_heads
            self.sinks["sinks"] = pad_rows(source.shard(f"{name}.sinks", (size,), 0, start, stop), width).float()
        for norm, part in zip(self.norms or self.joint_norms, ("q_norm", "k_norm"), strict=False):
            norm.load(source, f"{name}.{part}")
        if self.v_norm is not None:
            self.v_norm.weight = torch.ones(self.head_dim, dtype=self.dtype, device=self.device)
        if self.kv_format is not None:
            self._load_cache(source, name, self.kv_format)

    def _load_cache(self, source: WeightSource, name: str, form: KVFormat) -> None:
        """Loads what an 8-bit cache needs: which values of the keys stay in 16 bits, and static scales.

        Raises:
            StartupError: ``--kv-cache-scales checkpoint`` is given, but scales are missing or not positive.
        """
        if form.kept:
            size, start, stop, width = self.keys
            bias = pad_rows(source.shard(f"{name}.k_proj.bias", (size,), 0, start, stop), width)
            known = bias.cpu() if self.values else torch.zeros(width)
            self.pairs = pairs_of(known.view(-1, self.head_dim), form.kept).to(self.device)
        if form.static:
            scales = [source.kv_scale(name, kind) for kind in ("k", "v")]
            self.static = static_of(form, scales[0], scales[1]).to(self.device)

    def order_rows(self, name: str, rows: Tensor) -> Tensor:
        """Returns rows [outputs of whole heads, ...] of matrix ``name`` in the order that this layer's weights have."""
        if not self.rotary_dim or name.rpartition(".")[2] not in ROTATED:
            return rows
        spans = rotated_spans(self.head_dim, self.rotary_dim, self.adjacent)
        return reorder_heads(rows, self.head_dim, spans)

    def bind(self, kv: LayerKV) -> None:
        """Sets the cache of this layer."""
        self.kv = kv._replace(pairs=self.pairs, static=self.static) if self.kv_format is not None else kv

    def __call__(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None = None) -> Tensor:
        """Computes the layer, [n, hidden] -> [n, hidden] of the backend's dtype.

        The attention is a separate function, so that q, k and v are freed before the all-reduce; a graph would keep
        them. ``rows``: the adapters of the tokens.
        """
        return self.out(self._attend(x, rotary, attn, rows), rows)

    def share(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None = None) -> SharedAttention:
        """Computes the layer, and returns the keys and values of the launch with its output, for layers without."""
        q, k, v, gate = self._project(x, rotary, attn, rows)
        return SharedAttention(self.out(self._weigh_values(q, k, v, gate, attn), rows), k, v)

    def _attend(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None) -> Tensor:
        if not self.reads_kv:
            return self._weigh_values(*self._project(x, rotary, attn, rows), attn)
        q = self.qkv(x, rows).view(x.shape[0], -1, self.head_dim)
        q = self.norms[0].heads(q) if self.norms is not None else q
        q, _ = self.ops.rope_vision(q, q[:, :1], rotary)
        assert rotary.keys is not None and rotary.values is not None
        return self._weigh_values(q, rotary.keys, rotary.values, None, attn)

    def _weigh_values(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, attn: Attn) -> Tensor:
        """Returns the values weighted by attention and by the gate, if there is one: [n, heads * d]."""
        attended = self.ops.attend(q, k, v, self.kv, attn, self.scale, *self.window, **self.sinks)
        attended = attended.reshape(len(q), -1)
        return attended if gate is None else attended * gate.sigmoid()

    def _project(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None) -> ProjectedHeads:
        """Returns queries, keys and values, rotated and stored, and the gate of the output."""
        n = x.shape[0]
        q, k, *own = torch.split(self.qkv(x, rows), self.sizes, dim=1)
        v = k if self.keys_as_values else own[0]
        d, gate = self.head_dim, None
        if self.gated:
            q, gate = (part.reshape(n, -1) for part in q.view(n, -1, 2, d).unbind(2))
        if self.joint_norms:
            q, k = self.joint_norms[0].joint(q), self.joint_norms[1].joint(k)
        q, k, v = q.view(n, -1, d), k.view(n, -1, d), v.view(n, -1, d)
        if self.norms is not None:
            q, k = self.norms[0].heads(q), self.norms[1].heads(k)
        if self.v_norm is not None:
            v = self.v_norm.heads(v)
        if rotary.query_scale is not None:
            q = q * rotary.query_scale.to(q.dtype)[:, None, None]
        return ProjectedHeads(*self.ops.rope_store(q, k, v, rotary, self.kv, attn), gate)

    def nbytes(self) -> int:
        ones = None if self.v_norm is None else self.v_norm.weight
        beside = sum(t.nbytes for t in (self.pairs, self.static, self.sinks.get("sinks"), ones) if t is not None)
        return self.qkv.bytes + self.out.bytes + sum(norm.nbytes() for norm in self.norms or self.joint_norms) + beside
