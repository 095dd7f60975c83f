"""Operations of the plug-in that only some releases or cards have, under one signature each.

Derived from the bridge's public source (``hpu_ops/backend/sdpa_gen.cpp``, ``hpex/kernels/FusedSDPA.py``) and from their
use in vLLM's Gaudi plugin (``extension/utils.py``, ``extension/ops.py``, ``extension/features.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ADJUSTMENT_SINCE = (1, 22, 0, 494)

FP8_TOP = (240.0, 448.0)
"""Largest e4m3 value on a Gaudi 2, whose largest exponent is reserved for non-finite values, and on a Gaudi 3."""


FP8_EXPERTS = "fp8_fused_weights_dynamic"
"""The form of ``mixture_of_experts`` that rounds what is between its two products by itself, for each token."""


class OptionalSymbols(NamedTuple):
    """Optional fields of ``bridge.Bridge``; None if the plug-in or the card lacks one."""

    sdpa_parts: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    block_adjustment: Callable[..., Tensor] | None
    cast_to_fp8_v2: Callable[..., Tensor] | None
    cast_from_fp8: Callable[..., Tensor] | None
    fp8_gemm_v2: Callable[..., Tensor] | None
    fp8_top: float
    convert_from_uint4: Callable[..., Tensor] | None = None
    experts: Callable[..., Tensor] | None = None
    fp8_experts: Callable[..., Tensor] | None = None


def find_symbols(version: str | None, card: str) -> OptionalSymbols:
    """Returns the symbols that plug-in ``version`` (``1.24.1.35``; None: unknown) offers on ``card`` (``GAUDI3``)."""
    ops, build = torch.ops.hpu, tuple(int(n) for n in re.findall(r"\d+", version or "")[:4])
    if len(build) < 4:  # a release without a build number counts as its last build
        build = (*build, *(0, 0, 0, 1 << 30)[len(build) :])
    third = "gaudi3" in (card or "").lower().replace(" ", "")
    adjusts = build >= ADJUSTMENT_SINCE and third
    casts = hasattr(ops, "cast_to_fp8_v2") and hasattr(ops, "cast_from_fp8")
    return OptionalSymbols(
        sdpa_parts if hasattr(ops, "sdpa_recomp_fwd") else None,
        block_adjustment if adjusts and hasattr(ops, "block_softmax_adjustment") else None,
        cast_to_fp8_v2 if casts else None,
        cast_from_fp8 if casts else None,
        fp8_gemm_v2 if casts and hasattr(ops, "fp8_gemm_v2") else None,
        FP8_TOP[third],
        convert_from_uint4 if hasattr(ops, "convert_from_uint4") else None,
        mixture_of_experts if hasattr(ops, "mixture_of_experts") else None,
        mixture_of_fp8_experts if casts and hasattr(getattr(ops, "mixture_of_experts", None), FP8_EXPERTS) else None,
    )


def sdpa_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes attention of q [B, h, S, d] over k and v [B, g, T, d], which may be a part of a row's keys.

    ``mask`` is boolean and broadcasts to [B, 1, S, T]. Returns (out [B, h, S, d], the largest score of each query, the
    inverse of its sum of exponentials above that score, [B, h, S, 1] each): what training keeps for its backward pass.
    A causal call takes multiples of 1024 queries and keys, or its statistics are wrong.
    """
    rows, heads, count, d = q.shape
    groups = k.shape[1]
    fewer = groups not in (1, heads)
    if fewer:
        q = q.reshape(rows, groups, heads // groups, count, d)
        k, v = k[:, :, None], v[:, :, None]
        mask = None if mask is None else mask[:, None]
    found = torch.ops.hpu.sdpa_recomp_fwd(q, k, v, mask, 0.0, scale, is_causal, True, mode, None, "right")
    out, high, inverse = (t.reshape(rows, heads, count, -1) for t in found[:3])
    return out, high, inverse


def block_adjustment(high: Tensor, total: Tensor, rows: Tensor, count: int, shape: list[int]) -> Tensor:
    """Returns the factor of each block over its row's sum, of ``shape``: exp(high - M) / sum of exp(high - M) * total,
    with M the largest ``high`` of the row.

    Args:
        high, total: [B, g, h / g, 1, 1], the blocks' largest scores and sums of exponentials.
        rows: int32 [B], the row of each block, below ``count``; -1: the block belongs to no row.
    """
    found: Tensor = torch.ops.hpu.block_softmax_adjustment(high, total, rows, count, shape)
    return found


def mixture_of_experts(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
) -> Tensor:
    """Returns [n, hidden]: the sum of each token's ``chosen`` experts, int64 [n, top], weighted by ``shares`` [n, top].

    Args:
        gate_up, down: [2 x inner, hidden] and [hidden, inner] of each expert; the activation is SiLU.
    """
    found: Tensor = torch.ops.hpu.mixture_of_experts.fused_weights(
        x, chosen, shares, list(gate_up), list(down), True, "silu", 0, len(down) - 1
    )
    return found


def mixture_of_fp8_experts(
    x: Tensor, scale: Tensor, chosen: Tensor, shares: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor],
    gate_up_scale: Sequence[Tensor], down_scale: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Returns what ``mixture_of_experts`` does, for e4m3 codes of x and of the weights, in the dtype of ``shares``.

    Args:
        scale: float32 [n, 1]; what a code of ``x`` is multiplied by.
        gate_up_scale, down_scale: float32 [2 x inner] and [hidden] of each expert.
    """
    form = getattr(torch.ops.hpu.mixture_of_experts, FP8_EXPERTS)
    found: Tensor = form(
        x, chosen, shares, list(gate_up), list(down), scale, list(gate_up_scale), list(down_scale), True, "silu", 0,
        len(down) - 1,
    )  # fmt: skip
    return found


def cast_to_fp8_v2(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Returns float8_e4m3fn codes of x (bfloat16 or float32) times ``scale``, which broadcasts to it, rounded to
    nearest.
    """
    found: Tensor = torch.ops.hpu.cast_to_fp8_v2(x, scale, False, False, torch.float8_e4m3fn)[0]
    return found


def cast_from_fp8(codes: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Returns the values of 8-bit floats, times ``scale``, in ``dtype``."""
    found: Tensor = torch.ops.hpu.cast_from_fp8(codes, scale, dtype)
    return found


def fp8_gemm_v2(
    a: Tensor, b: Tensor, dtype: torch.dtype, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiplies a [n, k] by b [m, k] transposed, both e4m3, to [n, m] of ``dtype`` (bfloat16 or float32).

    Args:
        a_scale: float32 [n, 1]; what a code of ``a`` is multiplied by.
        b_scale: float32 [m].
    """
    found: Tensor = torch.ops.hpu.fp8_gemm_v2(a, False, b, True, None, dtype, a_scale, b_scale, bias, False)
    return found


def convert_from_uint4(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [k, m] of ``dtype``: (code - zero) times the scale of its group of rows.

    Args:
        codes: int32 [k, m / 8], the first of eight columns in the lowest bits.
        scale: [groups, m]; groups divide k.
        zero: int32 [groups, m / 8].
    """
    found: Tensor = torch.ops.hpu.convert_from_uint4(codes, scale, zero, dtype)
    return found
