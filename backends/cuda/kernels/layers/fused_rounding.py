"""Decoder layers of many tokens whose products round their activations: within the norms and SiLU before them.

Two launches a layer less than one after the other, and the normed rows are neither written nor read. Values are equal
bit for bit. The output of attention is rounded by a launch of its own.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from trencadis.backends.cuda.kernels import quantised_linear
from trencadis.backends.cuda.kernels.activation_rounding import RoundedRows, Rounding, round_to
from trencadis.backends.cuda.kernels.layers.fused_layer import has_plain_norms_and_sums
from trencadis.backends.cuda.kernels.layers.skinny_gemm import NormOf
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight
from trencadis.core.device.backend import Attn, Rotary
from trencadis.core.models.attention import Attention
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.linear_and_embedding import Linear
from trencadis.core.models.mlp_and_norms import GatedMLP, RMSNorm


class NormedRows(NamedTuple):
    """Rounded rows behind a norm, and the residual stream [n, hidden]."""

    rows: RoundedRows
    stream: Tensor


class RoundingLayer:
    """A ``core.models.decoder_layer.DecoderLayer`` for which ``can_fuse`` holds."""

    def __init__(self, layer: DecoderLayer) -> None:
        self._layer = layer

    def __call__(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> tuple[Tensor, Tensor]:
        """Runs the layer as ``DecoderLayer`` does."""
        layer = self._layer
        rows, stream = _norm(x, residual, layer.input_norm, layer.attention.qkv)
        # Nothing but the product reads what ``Attention`` gets: its shape, and then ``Ops.linear``.
        x = layer.attention(cast(Tensor, rows), rotary, attn)
        mlp = layer.mlp
        if not isinstance(mlp, GatedMLP) or mlp.act != "silu" or _find_rounding(mlp.gate_up, x) is None:
            normed, stream = layer.post_norm(x, stream)
            return mlp(normed), stream
        rows, stream = _norm(x, stream, layer.post_norm, mlp.gate_up)
        x = mlp.gate_up(cast(Tensor, rows))
        how = _find_rounding(mlp.down, x)
        inner = mlp.ops.act_mul(x, mlp.act) if how is None else cast(Tensor, round_to(x, how, gate=True))
        return mlp.down.reduce(mlp.down.product(inner)), stream


def _norm(x: Tensor, residual: Tensor | None, norm: object, linear: Linear) -> NormedRows:
    """Norms x, or x + residual, and rounds it for a product."""
    how = _find_rounding(linear, x)
    assert how is not None and isinstance(norm, RMSNorm)
    x = x.contiguous()
    stream = x if residual is None else torch.empty_like(x)
    before = NormOf(norm.weight, norm.eps, residual, None if residual is None else stream)
    return NormedRows(round_to(x, how, before), stream)


def _find_rounding(linear: Linear, x: Tensor) -> Rounding | None:
    """Returns how a layer of one weight wants ``x``'s rows rounded; None: it does not, or has several weights."""
    weight = linear.weights[0]
    if len(linear.weights) > 1 or not isinstance(weight, QuantisedWeight):
        return None
    return quantised_linear.choose_rounding(weight, len(x), x.dtype)


def can_fuse(layer: object, x: Tensor) -> bool:
    """Returns True for attention and an MLP, or experts, each behind an RMS norm, whose first product rounds its
    activations.
    """
    if not isinstance(layer, DecoderLayer) or not isinstance(layer.attention, Attention) or not len(x):
        return False
    return has_plain_norms_and_sums(layer) and _find_rounding(layer.attention.qkv, x) is not None
