"""Decoder layers in six launches, and the conditions for it; other layers run op by op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trencadis.backends.cpu.reference_ops import PlainWeight
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn, SingleAttn
from trencadis.backends.cuda.kernels.layers import (
    fused_decode_attention,
    fused_verify_attention,
    skinny_gemm,
    skinny_quantised_gemm,
)
from trencadis.backends.cuda.kernels.layers.fused_decode_attention import HeadNorms
from trencadis.backends.cuda.kernels.layers.skinny_gemm import NormOf
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight
from trencadis.core.device.backend import Attn, Rotary
from trencadis.core.models.attention import Attention
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.linear_and_embedding import Linear
from trencadis.core.models.mlp_and_norms import GatedMLP, RMSNorm


class FusedLayer:
    """A ``core.models.decoder_layer.DecoderLayer`` for up to ``skinny_gemm.FEW`` tokens, in six launches.

    They are qkv, attention and its join, output, gate and up, down; ranks are summed after output and after down. Rows
    have one token each, or any number of them, as in VERIFY.

    Args:
        planned: query heads per KV head by which launches were planned, if layers differ; 0: those of the layer.
    """

    def __init__(self, layer: DecoderLayer, arrived: Tensor, planned: int = 0) -> None:
        self._layer, self._arrived, self._planned = layer, arrived, planned

    def __call__(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> tuple[Tensor, Tensor | None]:
        """Runs the layer as ``DecoderLayer`` does. On one rank the returned stream already includes the output of the
        MLP.
        """
        layer, attention, mlp = self._layer, self._layer.attention, self._layer.mlp
        assert isinstance(mlp, GatedMLP) and isinstance(attn, ItemAttn)
        qkv, stream = self._norm_linear(x, residual, layer.input_norm, attention.qkv)
        norms = None
        if attention.norms is not None:
            queries, keys = attention.norms
            norms = HeadNorms(queries.weight, keys.weight, queries.eps)
        shared = qkv, rotary, attention.kv
        numbers = attention.scale, *attention.window
        if isinstance(attn, SingleAttn):
            attended = fused_decode_attention.attend(*shared, attn, *numbers, norms=norms)
        else:
            attended = fused_verify_attention.attend(*shared, attn, *numbers, norms=norms, planned=self._planned)
        x, residual = self._reduce_and_add(attended, attention.out, stream)
        inner, stream = self._norm_linear(x, residual, layer.post_norm, mlp.gate_up, gate=True)
        return self._reduce_and_add(inner, mlp.down, stream)

    def _norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Any, linear: Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns (product of the normed stream, the stream)."""
        stream = x if residual is None else torch.empty_like(x)
        before = NormOf(norm.weight, norm.eps, residual, None if residual is None else stream)
        return multiply(x, linear, self._arrived, before, gate), stream

    def _reduce_and_add(self, x: Tensor, linear: Linear, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns (x, residual) after a product whose ranks' parts are summed; one rank adds it to the stream at
        once.
        """
        if linear.comm.world == 1:
            return multiply(x, linear, self._arrived, residual=stream), None
        made = multiply(x, linear, self._arrived)
        added = getattr(linear.comm, "sum_added", None)
        if added is not None and (total := added(made, stream)) is not None:
            return total, None
        return linear.comm.all_reduce(made), stream


def multiply(
    x: Tensor, linear: Linear, arrived: Tensor, norm: NormOf | None = None, gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies by the single weight of a layer that ``can_fuse`` accepted (``skinny_gemm.product``)."""
    weight = linear.weights[0]
    if isinstance(weight, QuantisedWeight):
        return skinny_quantised_gemm.product(x, weight, arrived, norm, gate, residual)
    assert isinstance(weight, PlainWeight)
    return skinny_gemm.product(x, weight, arrived, norm, gate, residual)


def can_fuse(layer: Any, x: Tensor, attn: Any) -> bool:
    """Returns True if a launch of ``layer`` can be fused.

    It needs few tokens, each of which sees those before it, weights of the stream's dtype or quantised ones, RMS norms
    before attention and a gated SiLU MLP, and a cache of that dtype.
    """
    if not isinstance(layer, DecoderLayer) or not isinstance(attn, ItemAttn):
        return False
    return 0 < x.shape[0] <= skinny_gemm.FEW and attn.upto is None and _fits(layer, x)


def _fits(layer: DecoderLayer, x: Tensor) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or attention.gated:
        return False
    if (
        layer.norms_after_sum
        or layer.norms_after_parts
        or layer.out_norms
        or layer.scale != 1
        or not isinstance(mlp, GatedMLP)
        or mlp.act != "silu"
    ):
        return False
    if not (isinstance(layer.input_norm, RMSNorm) and isinstance(layer.post_norm, RMSNorm)):
        return False
    if attention.sinks or attention.scales_queries:
        return False
    held = attention.kv
    if held.k_scale is not None or held.k.dtype != x.dtype:
        return False
    return all(_takes(linear, x) for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down))


def _takes(linear: Linear, x: Tensor) -> bool:
    """Returns True for a single weight whose rows begin on 16 bytes, within the number of counters: a dense one of x's
    dtype, or codes that are multiplied without rounding activations.
    """
    if len(linear.weights) != 1:
        return False
    w = linear.weights[0]
    if isinstance(w, QuantisedWeight):
        return skinny_quantised_gemm.fits(w)
    if not isinstance(w, PlainWeight):
        return False
    sixteen = w.in_features * x.itemsize % 16 == 0 and w.weight.is_contiguous()
    return sixteen and w.weight.dtype == x.dtype and w.out_features <= 16 * skinny_gemm.COUNTERS
