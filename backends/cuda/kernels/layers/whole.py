"""Which decoder layers run in six launches, and those launches; all others run op by op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trencadis.backends.cpu.reference import PlainWeight
from trencadis.backends.cuda.kernels.attn import SingleAttn
from trencadis.backends.cuda.kernels.layers import attend, skinny
from trencadis.backends.cuda.kernels.layers.attend import HeadNorms
from trencadis.backends.cuda.kernels.layers.skinny import NormOf
from trencadis.core.backend import Attn, Rotary
from trencadis.core.layers.linear import Linear
from trencadis.core.layers.mlp import GatedMLP
from trencadis.core.layers.norm import RMSNorm
from trencadis.core.models.decoder import Layer


class WholeLayer:
    """``core.models.decoder.Layer`` for up to ``skinny.FEW`` rows of one token: qkv, attention and its join, output,
    gate and up, down; ranks sum behind the third and the last."""

    def __init__(self, layer: Layer, arrived: Tensor) -> None:
        self._layer, self._arrived = layer, arrived

    def __call__(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> tuple[Tensor, Tensor | None]:
        """As ``Layer``. On one rank the stream comes back with what the MLP adds already in it."""
        layer, attention, mlp = self._layer, self._layer.attention, self._layer.mlp
        assert isinstance(mlp, GatedMLP) and isinstance(attn, SingleAttn)
        qkv, stream = self._normed(x, residual, layer.input_norm, attention.qkv)
        norms = None
        if attention.norms is not None:
            queries, keys = attention.norms
            norms = HeadNorms(queries.weight, keys.weight, queries.eps)
        seen = attend.attend(qkv, rotary, attention.kv, attn, attention.scale, *attention.window, norms=norms)
        x, residual = self._added(seen, attention.out, stream)
        inner, stream = self._normed(x, residual, layer.post_norm, mlp.gate_up, gate=True)
        return self._added(inner, mlp.down, stream)

    def _normed(
        self, x: Tensor, residual: Tensor | None, norm: Any, linear: Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(product of the norm of the stream, the stream)."""
        stream = x if residual is None else torch.empty_like(x)
        before = NormOf(norm.weight, norm.eps, residual, None if residual is None else stream)
        return skinny.product(x, plain(linear), self._arrived, before, gate), stream

    def _added(self, x: Tensor, linear: Linear, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """(x, residual) behind a product whose ranks' parts are summed: one rank adds it to the stream at once."""
        if linear.comm.world == 1:
            return skinny.product(x, plain(linear), self._arrived, residual=stream), None
        made = skinny.product(x, plain(linear), self._arrived)
        added = getattr(linear.comm, "sum_added", None)
        if added is not None and (total := added(made, stream)) is not None:
            return total, None
        return linear.comm.all_reduce(made), stream


def plain(linear: Linear) -> PlainWeight:
    """The one weight of a layer that ``takes`` named."""
    weight = linear.weights[0]
    assert isinstance(weight, PlainWeight)
    return weight


def takes(layer: Any, x: Tensor, attn: Any) -> bool:
    """Whether a launch of ``layer`` runs whole: few rows of one token, dense weights of the stream's type, RMS norms
    before attention and a gated SiLU MLP, a cache of that type."""
    if not isinstance(layer, Layer) or not isinstance(attn, SingleAttn):
        return False
    return 0 < x.shape[0] <= skinny.FEW and attn.upto is None and _fits(layer, x)


def _fits(layer: Layer, x: Tensor) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if layer.behind or layer.out_norms or layer.scale != 1 or not isinstance(mlp, GatedMLP) or mlp.act != "silu":
        return False
    if not (isinstance(layer.input_norm, RMSNorm) and isinstance(layer.post_norm, RMSNorm)):
        return False
    held = attention.kv
    if held.k_scale is not None or held.k.dtype != x.dtype:
        return False
    return all(_dense(linear, x) for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down))


def _dense(linear: Linear, x: Tensor) -> bool:
    """One weight of x's type whose rows begin on 16 bytes, as wide as there are counters for."""
    if len(linear.weights) != 1 or not isinstance(linear.weights[0], PlainWeight):
        return False
    w = linear.weights[0]
    sixteen = w.in_features * x.itemsize % 16 == 0 and w.weight.is_contiguous()
    return sixteen and w.weight.dtype == x.dtype and w.out_features <= 16 * skinny.COUNTERS
