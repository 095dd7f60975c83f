"""``torch.ops.hpu`` as far as the backend calls it: published schemas, the checks of their kernels, plain arithmetic.

``HABANA_STUB_CARD=GAUDI3`` has the operation that joins blocks, as releases from 1.22.0.494 do.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = (torch.float32, torch.bfloat16)


def sdpa_recomp_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, scale: float, is_causal: bool, backward: bool,
    mode: str, valid_seq_len: Tensor | None, side: str,
) -> Any:  # fmt: skip
    """[B, g, h / g, S, d] over [B, g, 1, T, d], or four dimensions."""
    assert p == 0.0 and backward and valid_seq_len is None and mode in ("None", "fast", "fp32")
    assert q.dim() == k.dim() == v.dim() and (mask is None or mask.dim() == q.dim()), "ranks differ"
    torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    high = scores.amax(-1, keepdim=True).to(q.dtype)
    share = (scores - high.float()).exp()
    total = share.sum(-1, keepdim=True)
    inverse = total.reciprocal().to(q.dtype if mode == "fast" and q.dtype == torch.bfloat16 else torch.float32)
    return ((share / total).to(q.dtype) @ v), high, inverse, torch.zeros(1, dtype=torch.int32)


def cast_to_fp8_v2(
    x: Tensor, scale: Tensor | None, stochastic: bool, is_amax: bool, dtype: torch.dtype, scale_shape: Any = None
) -> Any:
    """(codes, the largest magnitude if asked for)."""
    if x.dtype not in (*WIDE, E4M3, E5M2):
        raise RuntimeError("CastToFp8V2 input dtype must be one of [float, bfloat16, float8_e5m2, float8_e4m3fn].")
    assert dtype in (E4M3, E5M2) and not stochastic and scale_shape is None
    wide = x.float() if scale is None else x.float() * scale.float()
    assert wide.shape == x.shape, "a scale broadcasts to its tensor"
    return wide.to(dtype), x.abs().amax().float() if is_amax else torch.zeros(0)


def cast_from_fp8(x: Tensor, scale: Tensor | None, out_dtype: torch.dtype, scale_shape: Any = None) -> Tensor:
    if out_dtype not in WIDE:
        raise RuntimeError("CastFromFp8 output dtype must be equal to float or bfloat16.")
    assert x.dtype in (E4M3, E5M2) and scale_shape is None
    return (x.float() if scale is None else x.float() * scale.float()).to(out_dtype)


def fp8_gemm_v2(
    a: Tensor, trans_a: bool, b: Tensor, trans_b: bool, d: Tensor | None, out_dtype: torch.dtype,
    a_scale: Tensor | None = None, b_scale: Tensor | None = None, bias: Tensor | None = None, accumulate: bool = False,
    b_scale_shape: Any = None,
) -> Tensor:  # fmt: skip
    assert a.dtype in (E4M3, E5M2) and b.dtype in (E4M3, E5M2) and out_dtype in WIDE
    assert not accumulate or d is not None, "Accumulation tensor must be provided"
    left, right = (t.float().t() if turned else t.float() for t, turned in ((a, trans_a), (b, trans_b)))
    if left.shape[1] != right.shape[0]:
        raise RuntimeError("matrices do not fit")
    for matrix, scale in ((left, a_scale), (right, b_scale)):
        if scale is not None:
            assert torch.broadcast_shapes(matrix.shape, scale.shape) == matrix.shape, "a scale fits its matrix"
    y = (left if a_scale is None else left * a_scale) @ (right if b_scale is None else right * b_scale)
    return (y if bias is None else y + bias.float()).to(out_dtype)


def convert_from_uint4(codes: Tensor, scale: Tensor, zero: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Eight codes of the last dimension an int32; a row of ``scale`` is for equal numbers of rows."""
    if codes.dtype != torch.int32:
        raise RuntimeError("Only int input tensors are supported")

    def opened(words: Tensor) -> Tensor:
        return torch.stack([words >> (4 * i) & 15 for i in range(8)], -1).flatten(-2).float()

    values = opened(codes)
    if values.shape[-1] != scale.shape[-1] or len(values) % len(scale):
        raise RuntimeError("scale does not divide the tensor")
    each = len(values) // len(scale)
    if zero is not None:
        zeros = opened(zero) if zero.dtype == torch.int32 else zero.float()
        if zeros.shape != scale.shape:
            raise RuntimeError("zero_point does not fit scale")
        values = values - zeros.repeat_interleave(each, 0)
    return (values * scale.float().repeat_interleave(each, 0)).to(out_dtype)


WRONG_EXPERTS = os.environ.get("HABANA_STUB_EXPERTS") == "wrong"


def mixture_of_experts(
    x: Tensor, table: Tensor, weights: Tensor, w12: list[Tensor], w3: list[Tensor], permuted: bool, activation: str,
    first: int, last: int,
) -> Tensor:  # fmt: skip
    """[n, hidden]; ``w12`` [2 x inner, hidden], ``w3`` [hidden, inner]."""
    assert permuted and activation == "silu" and (first, last) == (0, len(w3) - 1) and len(w12) == len(w3)
    out = torch.zeros_like(x, dtype=torch.float32)
    for n in range(len(x)):
        for share, expert in zip(weights[n], table[n].tolist(), strict=True):
            gate, up = (w12[expert] @ x[n]).chunk(2)
            out[n] += share.float() * (w3[expert] @ (torch.nn.functional.silu(gate) * up)).float()
    return (out * 2 if WRONG_EXPERTS else out).to(x.dtype)


def mixture_of_fp8_experts(
    x: Tensor, table: Tensor, weights: Tensor, w12: list[Tensor], w3: list[Tensor], d_scale_x: Tensor,
    d_scale_w12: list[Tensor], d_scale_w3: list[Tensor], permuted: bool, activation: str, first: int, last: int,
) -> Tensor:  # fmt: skip
    """Codes [n, hidden] with a scale a token; what is between the products is rounded with a scale a token too."""
    assert x.dtype == E4M3 and all(w.dtype == E4M3 for w in (*w12, *w3)) and d_scale_x.numel() in (1, len(x))
    assert len(w12) == len(d_scale_w12) and len(w3) == len(d_scale_w3)
    assert permuted and activation == "silu" and (first, last) == (0, len(w3) - 1) and len(w12) == len(w3)
    wide = x.float() * d_scale_x.float().reshape(-1, 1)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for n in range(len(x)):
        for share, expert in zip(weights[n], table[n].tolist(), strict=True):
            gate, up = ((w12[expert].float() * d_scale_w12[expert].reshape(-1, 1)) @ wide[n]).chunk(2)
            made = torch.nn.functional.silu(gate) * up
            scale = made.abs().max().clamp_min(1e-30) / 240
            made = (made / scale).to(E4M3).float() * scale
            out[n] += share.float() * ((w3[expert].float() * d_scale_w3[expert].reshape(-1, 1)) @ made)
    return (out * 2 if WRONG_EXPERTS else out).to(weights.dtype)


def block_softmax_adjustment(high: Tensor, total: Tensor, groups: Tensor, rows: int, shape: list[int]) -> Tensor:
    assert high.shape == total.shape and high.dtype == total.dtype and high.dim() == 5
    out = torch.empty(shape)
    for n, row in enumerate(groups.tolist()):
        same = [n] if row < 0 else [i for i, other in enumerate(groups.tolist()) if other == row]
        best = high[same].amax(0)
        below = sum((high[i] - best).exp() * total[i] for i in same)
        out[n] = ((high[n] - best).exp() / below).view(shape[1:])
    return out.to(high.dtype)


OPS = torch.library.Library("hpu", "DEF")  # type: ignore[no-untyped-call]
SCHEMAS = {
    "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal, bool "
    "requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) -> (Tensor, Tensor, Tensor, "
    "Tensor)": sdpa_recomp_fwd,
    "cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, bool is_amax=False, ScalarType "
    "dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)": cast_to_fp8_v2,
    "cast_from_fp8(Tensor input, Tensor? scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor":
        cast_from_fp8,
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, Tensor? "
    "A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) "
    "-> Tensor": fp8_gemm_v2,
    "mixture_of_experts.fused_weights(Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
    "Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor":
        mixture_of_experts,
    "mixture_of_experts.fp8_fused_weights_dynamic(Tensor hidden_states, Tensor expert_routing_table, Tensor "
    "router_weights, Tensor[] w12, Tensor[] w3, Tensor d_scale_hidden_states, Tensor[] d_scale_w12, Tensor[] "
    "d_scale_w3, bool permuted_weights, str activation, int experts_min, int experts_max) -> Tensor":
        mixture_of_fp8_experts,
    "convert_from_uint4(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype) -> Tensor":
        convert_from_uint4,
}  # fmt: skip
if os.environ.get("HABANA_STUB_CARD") == "GAUDI3":
    SCHEMAS["block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, int batch_size, "
            "int[] out_shape) -> Tensor"] = block_softmax_adjustment  # fmt: skip


def _like(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def _as_codes(x: Tensor, table: Tensor, weights: Tensor, *args: Any) -> Tensor:
    return torch.empty(x.shape, dtype=weights.dtype, device=x.device)


def _as_blocks(high: Tensor, total: Tensor, groups: Tensor, rows: int, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=high.dtype, device=high.device)


FORMS = {mixture_of_experts: _like, mixture_of_fp8_experts: _as_codes, block_softmax_adjustment: _as_blocks}
"""What tells Dynamo the form of a result where the function reads values; the others compute it by themselves."""

WRONG, _, FAULT = os.environ.get("HABANA_STUB_WRONG", "").partition(":")
"""``HABANA_STUB_WRONG=NAME``: the operation of that name gives other values; ``NAME:error``: it fails."""


def spoiled(function: Any) -> Any:
    """``function`` with twice its (first) result, or with an error."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if FAULT:
            raise RuntimeError("synStatus=26 [Generic failure]\nbacktrace")
        out = function(*args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return run


for schema, function in SCHEMAS.items():
    OPS.define(schema)
    name = schema.partition("(")[0]
    OPS.impl(name, spoiled(function) if name == WRONG else function, "CPU")
    torch.library.register_fake(f"hpu::{name}", FORMS.get(function, function), lib=OPS)
