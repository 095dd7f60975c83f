"""Causal self-attention over the paged cache, with grouped KV heads, and norms of q and k where the model has them."""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.backend import Attn, Backend, LayerKV, Rotary
from trencadis.core.checkpoint.model_config import TextConfig
from trencadis.core.layers.linear import ColumnPart, Columns, Rows, check_heads, unit_span
from trencadis.core.layers.norm import RMSNorm
from trencadis.core.layers.source import Source


class Attention:
    """Fused qkv, norms of heads, rotary and store, attend, output projection."""

    kv: LayerKV

    def __init__(self, backend: Backend, c: TextConfig) -> None:
        comm, d = backend.comm, c.head_dim
        check_heads(c.heads, comm.world, "query heads")
        self.ops = backend.ops
        self.head_dim, self.scale = d, c.score_scale
        sizes = {"q_proj": c.heads, "k_proj": c.kv_heads, "v_proj": c.kv_heads}
        parts = tuple(ColumnPart(name, heads * d, d) for name, heads in sizes.items())
        self.qkv = Columns(self.ops, comm, c.hidden, parts, bias=c.qkv_bias)
        self.out = Rows(self.ops, comm, c.heads * d, c.hidden, unit=d, bias=c.out_bias)
        self.sizes = [unit_span(part.size, d, comm.rank, comm.world).width for part in parts]
        self.heads = self.sizes[0] // d
        self.norms = (RMSNorm(self.ops, d, c.eps), RMSNorm(self.ops, d, c.eps)) if c.qk_norm else None

    def load(self, source: Source, name: str) -> None:
        self.qkv.load(source, name)
        self.out.load(source, f"{name}.o_proj")
        for norm, part in zip(self.norms or (), ("q_norm", "k_norm"), strict=False):
            norm.load(source, f"{name}.{part}")

    def __call__(self, x: Tensor, rotary: Rotary, attn: Attn) -> Tensor:
        """[n, hidden] -> [n, hidden] of the backend's dtype.

        The attention is a function of its own, so that q, k and v are freed before ranks sum: a graph would keep them.
        """
        return self.out(self._attended(x, rotary, attn))

    def _attended(self, x: Tensor, rotary: Rotary, attn: Attn) -> Tensor:
        n = x.shape[0]
        q, k, v = torch.split(self.qkv(x), self.sizes, dim=1)
        d = self.head_dim
        q, k, v = q.view(n, -1, d), k.view(n, -1, d), v.view(n, -1, d)
        if self.norms is not None:
            q, k = self.norms[0].heads(q), self.norms[1].heads(k)
        q, k, v = self.ops.rope_store(q, k, v, rotary, self.kv, attn)
        return self.ops.attend(q, k, v, self.kv, attn, self.scale).reshape(n, -1)

    def nbytes(self) -> int:
        return self.qkv.bytes + self.out.bytes + sum(norm.nbytes() for norm in self.norms or ())
