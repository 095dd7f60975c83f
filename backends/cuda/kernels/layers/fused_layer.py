"""Decoder layers in six launches, those of gated DeltaNet in seven, and the conditions for it; other layers run op by
op. Before experts, and MLPs of another kind, the first four or five of these launches run.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from trencadis.backends.cpu.recurrent_ops import EPS
from trencadis.backends.cpu.reference_ops import PlainWeight
from trencadis.backends.cuda.kernels import delta_net_step, quantised_linear
from trencadis.backends.cuda.kernels.activation_rounding import round_few, round_to
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn, SingleAttn
from trencadis.backends.cuda.kernels.layers import (
    fused_decode_attention,
    fused_verify_attention,
    skinny_gemm,
    skinny_quantised_gemm,
)
from trencadis.backends.cuda.kernels.layers.fused_decode_attention import AttentionForm, HeadNorms
from trencadis.backends.cuda.kernels.layers.skinny_gemm import NormOf
from trencadis.backends.cuda.weights.quantised_weight import QuantisedWeight
from trencadis.core.device.backend import Attn, Rotary
from trencadis.core.device.launch_tensors import RecurrentRows
from trencadis.core.models.attention import Attention
from trencadis.core.models.decoder_layer import DecoderLayer
from trencadis.core.models.gated_delta import GatedDeltaNet
from trencadis.core.models.linear_and_embedding import Linear
from trencadis.core.models.mlp_and_norms import GatedMLP, RMSNorm


class FusedLayer:
    """A ``core.models.decoder_layer.DecoderLayer`` for up to ``skinny_gemm.FEW`` tokens, in six launches.

    They are qkv, attention and its join, output, gate and up, down; ranks are summed after output and after down. Rows
    have one token each, or any number of them, as in VERIFY. In a layer of gated DeltaNet, whose rows have one token
    each, the product of the gates, the convolution and the rest up to the output take the place of attention and join.
    A product whose activations are rounded has one launch more, which also norms. Experts, and an MLP that
    ``can_fuse_mlp`` refuses, run op by op behind them.

    Args:
        planned: query heads per KV head by which launches were planned, if layers differ; 0: those of the layer.
    """

    def __init__(self, layer: DecoderLayer, arrived: Tensor, planned: int = 0) -> None:
        self._layer, self._arrived, self._planned = layer, arrived, planned

    def __call__(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: Attn) -> tuple[Tensor, Tensor | None]:
        """Runs the layer as ``DecoderLayer`` does. On one rank the returned stream already includes the output of a
        fused MLP.
        """
        layer, attention, mlp = self._layer, self._layer.attention, self._layer.mlp
        assert isinstance(attn, ItemAttn)
        if layer.recurrent:
            attended, stream = self._mix_states(x, residual, cast(RecurrentRows, rotary))
        else:
            attended, stream = self._attend(x, residual, rotary, attn)
        x, residual = self._reduce_and_add(attended, attention.out, stream)
        if not can_fuse_mlp(mlp, x):
            normed, stream = layer.post_norm(x, residual)
            return mlp(normed), stream
        assert isinstance(mlp, GatedMLP)
        inner, stream = self._norm_linear(x, residual, layer.post_norm, mlp.gate_up, gate=True)
        return self._reduce_and_add(inner, mlp.down, stream)

    def _attend(self, x: Tensor, residual: Tensor | None, rotary: Rotary, attn: ItemAttn) -> tuple[Tensor, Tensor]:
        """Returns (attention before its output projection, the stream)."""
        attention = self._layer.attention
        qkv, stream = self._norm_linear(x, residual, self._layer.input_norm, attention.qkv)
        norms = None
        if attention.norms is not None:
            queries, keys = attention.norms
            norms = HeadNorms(queries.weight, keys.weight, queries.eps)
        shared = qkv, rotary, attention.kv
        window, sinks = attention.window[0] if attention.window else 0, attention.sinks.get("sinks")
        form = AttentionForm(attention.scale, window, norms, attention.gated, sinks)
        if isinstance(attn, SingleAttn):
            return fused_decode_attention.attend(*shared, attn, form), stream
        return fused_verify_attention.attend(*shared, attn, form, self._planned), stream

    def _mix_states(self, x: Tensor, residual: Tensor | None, rows: RecurrentRows) -> tuple[Tensor, Tensor]:
        """Returns (gated DeltaNet before its output projection, the stream), and updates the states of the rows."""
        mixer = cast(GatedDeltaNet, self._layer.attention)
        mixed, stream = self._norm_linear(x, residual, self._layer.input_norm, mixer.qkv)
        gates, _ = self._norm_linear(stream, None, self._layer.input_norm, mixer.gates)
        return delta_net_step.run(mixed, gates, mixer.weights, mixer.state, rows, EPS), stream

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
        if weight.rounds:
            codes, scales = round_few(x, weight.kind, norm)
            return skinny_quantised_gemm.product(codes, weight, arrived, None, gate, residual, scales, x.dtype)
        how = quantised_linear.choose_rounding(weight, len(x), x.dtype)
        if how is not None:  # in groups, whose values these kernels take
            rounded = round_to(x, how, norm, dependent=True)
            return skinny_quantised_gemm.product(rounded.codes, weight, arrived, None, gate, residual)
        return skinny_quantised_gemm.product(x, weight, arrived, norm, gate, residual)
    assert isinstance(weight, PlainWeight)
    return skinny_gemm.product(x, weight, arrived, norm, gate, residual)


def can_fuse(layer: Any, x: Tensor, attn: Any, place: object = None) -> bool:
    """Returns True if a launch of ``layer`` can be fused, at least up to its MLP or experts.

    It needs few tokens, each of which sees those before it, weights of the stream's dtype or quantised ones, RMS norms
    before attention and MLP, and a cache of that dtype.

    Args:
        place: of a recurrent layer, the rows of states.
    """
    if not isinstance(layer, DecoderLayer) or not isinstance(attn, ItemAttn):
        return False
    if not 0 < x.shape[0] <= skinny_gemm.FEW or attn.upto is not None or not has_plain_norms_and_sums(layer):
        return False
    mixer: object = layer.attention  # a recurrent layer takes the place of attention
    if isinstance(mixer, GatedDeltaNet):
        fits = isinstance(attn, SingleAttn) and delta_net_step.fits(mixer.weights, mixer.state, place)
        return fits and _take(x, mixer.qkv, mixer.gates, mixer.out)
    return isinstance(mixer, Attention) and _fits(mixer, x) and _take(x, mixer.qkv, mixer.out)


def can_fuse_mlp(mlp: object, x: Tensor) -> bool:
    """Returns True for a gated SiLU MLP whose weights the fused products take."""
    return isinstance(mlp, GatedMLP) and mlp.act == "silu" and _take(x, mlp.gate_up, mlp.down)


def has_plain_norms_and_sums(layer: DecoderLayer) -> bool:
    """Returns True for an RMS norm before attention and another before the MLP, and a plain sum behind each."""
    if layer.norms_after_sum or layer.norms_after_parts or layer.shapes_outputs:
        return False
    if layer.beside is not None or layer.sums_stream or layer.gives_kv:
        return False
    return isinstance(layer.input_norm, RMSNorm) and isinstance(layer.post_norm, RMSNorm)


def _fits(attention: Attention, x: Tensor) -> bool:
    """Returns True for attention whose kernels are fused, over a cache of the stream's dtype."""
    others = attention.v_norm is not None or bool(attention.joint_norms) or attention.keys_as_values
    if others or attention.reads_kv or attention.scales_queries:
        return False
    held = attention.kv
    return held.k_scale is None and held.k.dtype == x.dtype


def _take(x: Tensor, *linears: Linear) -> bool:
    return all(_takes(linear, x) for linear in linears)


def _takes(linear: Linear, x: Tensor) -> bool:
    """Returns True for a single weight whose rows begin on 16 bytes, within the number of counters: a dense one of x's
    dtype, or codes.
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
