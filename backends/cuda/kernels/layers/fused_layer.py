"""Which decoder layers run in six launches, and those launches; all others run op by op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trencadis.backends.cpu.reference_ops import PlainWeight
from trencadis.backends.cuda.kernels.attention_tensors import SingleAttn
from trencadis.backends.cuda.kernels.layers import fused_decode_attention, skinny_gemm
from trencadis.backends.cuda.kernels.layers.fused_decode_attention import HeadNorms
from trencadis.backends.cuda.kernels.layers.skinny_gemm import NormOf
from trencadis.core.backend import Attn, Rotary
from trencadis.core.layers.linear import Linear
from trencadis.core.layers.mlp import GatedMLP
from trencadis.core.layers.norm import RMSNorm
from trencadis.core.models.decoder import DecoderLayer


class FusedLayer:
    """``core.models.decoder.DecoderLayer`` for up to ``skinny_gemm.FEW`` rows of one token: qkv, attention and its
    join, output, gate and up, down; ranks sum behind the third and the last."""

    def __init__(self, layer: DecoderLayer, arrived: Tensor) -> None:
        self._layer, self._arrived = layer, arrived

    def __call__(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> tuple[Tensor, Tensor | None]:
        """As ``DecoderLayer``. On one rank the stream comes back with what the MLP adds already in it."""
        layer, attention, mlp = self._layer, self._layer.attention, self._layer.mlp
        assert isinstance(mlp, GatedMLP) and isinstance(attn, SingleAttn)
        qkv, stream = self._norm_linear(x, residual, layer.input_norm, attention.qkv)
        norms = None
        if attention.norms is not None:
            queries, keys = attention.norms
            norms = HeadNorms(queries.weight, keys.weight, queries.eps)
        attended = fused_decode_attention.attend(
            qkv, rotary, attention.kv, attn, attention.scale, *attention.window, norms=norms
        )
        x, residual = self._reduce_and_add(attended, attention.out, stream)
        inner, stream = self._norm_linear(x, residual, layer.post_norm, mlp.gate_up, gate=True)
        return self._reduce_and_add(inner, mlp.down, stream)

    def _norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Any, linear: Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(product of the norm of the stream, the stream)."""
        stream = x if residual is None else torch.empty_like(x)
        before = NormOf(norm.weight, norm.eps, residual, None if residual is None else stream)
        return skinny_gemm.product(x, single_weight(linear), self._arrived, before, gate), stream

    def _reduce_and_add(self, x: Tensor, linear: Linear, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """(x, residual) behind a product whose ranks' parts are summed: one rank adds it to the stream at once."""
        if linear.comm.world == 1:
            return skinny_gemm.product(x, single_weight(linear), self._arrived, residual=stream), None
        made = skinny_gemm.product(x, single_weight(linear), self._arrived)
        added = getattr(linear.comm, "sum_added", None)
        if added is not None and (total := added(made, stream)) is not None:
            return total, None
        return linear.comm.all_reduce(made), stream


def single_weight(linear: Linear) -> PlainWeight:
    """Returns the single dense weight of a layer that ``can_fuse`` accepted."""
    weight = linear.weights[0]
    assert isinstance(weight, PlainWeight)
    return weight


def can_fuse(layer: Any, x: Tensor, attn: Any) -> bool:
    """Whether a launch of ``layer`` runs whole: few rows of one token, dense weights of the stream's type, RMS norms
    before attention and a gated SiLU MLP, a cache of that type."""
    if not isinstance(layer, DecoderLayer) or not isinstance(attn, SingleAttn):
        return False
    return 0 < x.shape[0] <= skinny_gemm.FEW and attn.upto is None and _fits(layer, x)


def _fits(layer: DecoderLayer, x: Tensor) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if (
        layer.norms_after_sum
        or layer.out_norms
        or layer.scale != 1
        or not isinstance(mlp, GatedMLP)
        or mlp.act != "silu"
    ):
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
    return sixteen and w.weight.dtype == x.dtype and w.out_features <= 16 * skinny_gemm.COUNTERS
