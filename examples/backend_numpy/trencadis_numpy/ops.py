"""The heavy ops in numpy; the others are the reference's. Letters as in ``trencadis.core.device.backend.Ops``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.device.backend import Attn, LayerKV, Rotary, RotatedHeads, Segments, Weight
from trencadis.core.vision_config import WINDOW_SLOTS

Array = NDArray[Any]


class Transposed:
    """A weight in the layout that numpy multiplies fastest: [in, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.matrix = np.ascontiguousarray(weight.numpy().T)
        self.bias = None if bias is None else bias.numpy().copy()
        self.out_features, self.in_features = weight.shape


class NumpyOps(ReferenceOps):
    """``trencadis.core.device.backend.Ops`` over tensors that share their memory with arrays."""

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        return Transposed(weight.detach(), None if bias is None else bias.detach())

    def linear(self, x: Tensor, w: Weight) -> Tensor:
        assert isinstance(w, Transposed)
        y = x.numpy() @ w.matrix
        return torch.from_numpy(y if w.bias is None else y + w.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x.numpy() if residual is None else x.numpy() + residual.numpy()
        scale = 1 / np.sqrt(np.square(total).mean(-1, keepdims=True) + np.float32(eps))
        return torch.from_numpy(total * scale * weight.numpy()), torch.from_numpy(total)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = np.split(gate_up.numpy(), 2, axis=-1)
        with np.errstate(over="ignore"):
            return torch.from_numpy(gate / (1 + np.exp(-gate)) * up)

    def rotary(self, positions: Tensor, inv_freq: Tensor, axis: Tensor) -> Rotary:
        angle = positions.numpy().astype(np.float32)[axis.numpy()].T * inv_freq.numpy()
        both = np.concatenate([angle, angle], axis=-1)
        return Rotary(torch.from_numpy(np.cos(both)), torch.from_numpy(np.sin(both)))

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, kv: LayerKV, attn: Attn) -> RotatedHeads:
        slots, k = attn.slot_map.numpy(), torch.from_numpy(turned(k.numpy(), rotary))
        for cache, values in zip(kv[:2], (k, v), strict=True):
            flat = cache.numpy()
            flat.reshape(-1, *flat.shape[2:])[slots] = values.numpy()
        return RotatedHeads(torch.from_numpy(turned(q.numpy(), rotary)), k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, attn: Attn, scale: float) -> Tensor:
        """Attention [n, h, d] row by row over the cache, the launch's own keys included; surplus tokens get zeros."""
        queries, out = q.numpy(), np.zeros(q.shape, np.float32)
        starts, context, blocks = attn.row_start.numpy(), attn.context.numpy(), attn.blocks.numpy()
        size = kv.k.shape[1]
        for row in range(len(starts) - 2):
            first, last = starts[row], starts[row + 1]
            if first == last:
                continue
            seen = context[row] + last - first
            listed = blocks[row, : -(-seen // size)]
            keys, values = (c.numpy()[listed].reshape(-1, *c.shape[2:])[:seen] for c in kv[:2])
            hidden = np.arange(seen) > (context[row] + np.arange(last - first))[:, None]
            out[first:last] = attention(queries[first:last], keys, values, hidden, scale)
        return torch.from_numpy(out)

    def rope_vision(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(turned(q.numpy(), rotary)), torch.from_numpy(turned(k.numpy(), rotary))

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        return self._segments(q, k, v, np.arange(len(seg.real)), seg, scale)

    def attend_images(self, q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float) -> Tensor:
        return self._segments(q, k, v, seg.segment.numpy(), seg, scale)

    def _segments(self, q: Tensor, k: Tensor, v: Tensor, owner: Array, seg: Segments, scale: float) -> Tensor:
        """Windows with the same ``owner`` see each other's real slots; padding slots get zeros."""
        real = (np.arange(WINDOW_SLOTS) < seg.real.numpy()[:, None]).ravel()
        slots, out = np.repeat(owner, WINDOW_SLOTS), np.zeros(q.shape, np.float32)
        for one in np.unique(owner):
            here = np.flatnonzero((slots == one) & real)
            nothing = np.zeros((len(here), len(here)), bool)
            out[here] = attention(*(t.numpy()[here] for t in (q, k, v)), nothing, scale)
        return torch.from_numpy(out)

    def embed(
        self, tokens: Tensor, from_slot: Tensor, last: Tensor, image_row: Tensor, arena: Tensor, table: Tensor
    ) -> Tensor:
        slot, row = from_slot.numpy(), image_row.numpy()
        ids = np.where(slot > 0, last.numpy()[slot], tokens.numpy())
        return torch.from_numpy(np.where((row > 0)[:, None], arena.numpy()[row], table.numpy()[ids]))


def attention(q: Array, k: Array, v: Array, hidden: Array, scale: float) -> Array:
    """[n, h, d] over [m, g, d]; query head i reads KV head i // (h / g)."""
    n, heads, d = q.shape
    groups = k.shape[1]
    queries = q.reshape(n, groups, heads // groups, d).transpose(1, 2, 0, 3)
    scores = queries @ k.transpose(1, 2, 0)[:, None] * np.float32(scale)
    scores = np.where(hidden, np.finfo(np.float32).min, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(n, heads, d)


def turned(x: Array, rotary: Rotary) -> Array:
    """Rotates [n, h, d] by angles [n, d]; each value of a head's first half pairs with one of its second half."""
    cos, sin = rotary.cos.numpy()[:, None], rotary.sin.numpy()[:, None]
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin
