"""Causal self-attention over the paged cache, with grouped KV heads, norms of q and k, and rotary embedding."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from trencadis.core.checkpoint.model_config import RMS_ONE, TextConfig
from trencadis.core.checkpoint.weight_source_interface import WeightSource
from trencadis.core.device.backend import AdapterRows, Attn, Backend, LayerKV, Rotary, SinksArgument
from trencadis.core.kv_cache_format import KVFormat
from trencadis.core.models.kv_cache_quantisation import pairs_of, static_of
from trencadis.core.models.linear_and_embedding import (
    ColumnParallelLinear,
    ColumnPart,
    RowParallelLinear,
    check_heads,
    pad_rows,
    unit_span,
)
from trencadis.core.models.mlp_and_norms import RMSNorm
from trencadis.core.models.model_and_ops_api import GatingOps
from trencadis.core.models.rotary_embedding import (
    ROTATED,
    PartialRotarySource,
    gate_spans,
    reorder_heads,
    rotated_spans,
)


class SharedAttention(NamedTuple):
    """The output of attention, [n, hidden], and the keys and values of the launch, [n, KV heads, d] each."""

    out: Tensor
    k: Tensor
    v: Tensor


class ProjectedHeads(NamedTuple):
    """Queries [n, h, d], keys and values [n, g, d], and the gate of the output, [n, h, d] or None."""

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
        gate = gate_spans(self.head_dim, self.gated and name.endswith("q_proj"))
        spans = (*rotated_spans(self.head_dim, self.rotary_dim, self.adjacent), *gate)
        return reorder_heads(rows, spans[-1].stop, spans)

    def bind(self, kv: LayerKV) -> None:
        """Sets the cache of this layer."""
        self.kv = kv._replace(pairs=self.pairs, static=self.static) if self.kv_format is not None else kv

    def __call__(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None = None) -> Tensor:
        """Computes the layer, [n, hidden] -> [n, hidden] of the backend's dtype.

        q, k and v have no names here, so that they are freed before the all-reduce; a graph would keep them.
        ``rows``: the adapters of the tokens.
        """
        return self.out(self._weigh_values(*self._project(x, rotary, attn, rows), attn), rows)

    def share(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None = None) -> SharedAttention:
        """Computes the layer, and returns the keys and values of the launch with its output, for layers without."""
        q, k, v, gate = self._project(x, rotary, attn, rows)
        return SharedAttention(self.out(self._weigh_values(q, k, v, gate, attn), rows), k, v)

    def _weigh_values(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, attn: Attn) -> Tensor:
        """Returns the values weighted by attention and by the gate, if there is one: [n, heads * d]."""
        attended = self.ops.attend(q, k, v, self.kv, attn, self.scale, *self.window, **self.sinks)
        if gate is None:
            return attended.reshape(len(q), -1)
        if hasattr(self.ops, "gate_heads"):
            return cast(GatingOps, self.ops).gate_heads(attended, gate).view(len(q), -1)
        return attended.reshape(len(q), -1) * gate.reshape(len(q), -1).sigmoid()

    def _project(self, x: Tensor, rotary: Rotary, attn: Attn, rows: AdapterRows | None) -> ProjectedHeads:
        """Returns queries, keys and values, rotated and stored, and the gate of the output."""
        if self.reads_kv:
            return self._project_queries(x, rotary, rows)
        n = x.shape[0]
        q, k, *own = torch.split(self.qkv(x, rows), self.sizes, dim=1)
        v = k if self.keys_as_values else own[0]
        d, gate = self.head_dim, None
        if self.gated:
            q, gate = q.view(n, -1, 2, d).unbind(2)  # their heads lie apart
        if self.joint_norms:
            q, k = self.joint_norms[0].joint(q.reshape(n, -1)), self.joint_norms[1].joint(k)
        q, k, v = q.view(n, -1, d), k.view(n, -1, d), v.view(n, -1, d)
        if self.norms is not None:
            q, k = self.norms[0].heads(q), self.norms[1].heads(k)
        if self.v_norm is not None:
            v = self.v_norm.heads(v)
        if rotary.query_scale is not None:
            q = q * rotary.query_scale.to(q.dtype)[:, None, None]
        return ProjectedHeads(*self.ops.rope_store(q, k, v, rotary, self.kv, attn), gate)

    def _project_queries(self, x: Tensor, rotary: Rotary, rows: AdapterRows | None) -> ProjectedHeads:
        """Returns rotated queries, with the keys and values of an earlier layer."""
        q = self.qkv(x, rows).view(x.shape[0], -1, self.head_dim)
        q = self.norms[0].heads(q) if self.norms is not None else q
        q, _ = self.ops.rope_vision(q, q[:, :1], rotary)
        assert rotary.keys is not None and rotary.values is not None
        return ProjectedHeads(q, rotary.keys, rotary.values, None)

    def nbytes(self) -> int:
        ones = None if self.v_norm is None else self.v_norm.weight
        beside = sum(t.nbytes for t in (self.pairs, self.static, self.sinks.get("sinks"), ones) if t is not None)
        return self.qkv.bytes + self.out.bytes + sum(norm.nbytes() for norm in self.norms or self.joint_norms) + beside
