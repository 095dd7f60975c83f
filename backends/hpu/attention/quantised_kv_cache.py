"""An 8-bit KV cache on Gaudi: storing, reading it as keys and values, and decoding over its codes.

Codes are exact in bfloat16, so decoding multiplies by them as they are and scales the scores; the fused kernel, which
prompts use, gets keys and values that are made of the codes in float32. A launch reads its own keys as it has stored
them, so that a token's keys are the same in the launch that computes them and in all later ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trencadis.backends.hpu.attention.attention_input_types import AttentionKernels, SharedDecode
from trencadis.backends.hpu.attention.plain_attention import times, weigh
from trencadis.core.device.backend import LayerKV
from trencadis.core.models.kv_cache_quantisation import codes_of, scale_for_codes, split


class CodedTokens(NamedTuple):
    """Keys or values of some tokens as they are stored."""

    codes: Tensor  # [..., g, d]
    scale: Tensor  # float16 [..., g]
    kept: Tensor | None = None  # [..., g, kept]


def store(k: Tensor, v: Tensor, kv: LayerKV, slot: Tensor, kernels: AttentionKernels) -> tuple[Tensor, Tensor]:
    """Stores k and v [n, g, d] at slots of a flat cache; returns them as they will be read."""
    assert kv.k_scale is not None and kv.v_scale is not None
    rest, kept = split(k, kv)
    if kept is not None and kv.kept is not None:
        kv.kept.index_copy_(0, slot, kept)
    statics = (None, None) if kv.static is None else kv.static.unbind()
    own = []
    for x, codes, scales, static, kept_values in zip(
        (rest, v), kv[:2], (kv.k_scale, kv.v_scale), statics, (kept, None), strict=True
    ):
        units, scale = scale_for_codes(x, codes_of(codes), static)
        made = encode(units, codes.dtype, kernels)
        codes.index_copy_(0, slot, made)
        scales.index_copy_(0, slot, scale)
        own.append(values(CodedTokens(made, scale, kept_values), kv.pairs, k.dtype, kernels))
    return own[0], own[1]


def encode(units: Tensor, dtype: torch.dtype, kernels: AttentionKernels) -> Tensor:
    """Returns codes of ``dtype`` for float32 values within their range."""
    if dtype == torch.int8:
        return units.round().to(torch.int8)
    assert kernels.to_fp8 is not None
    return kernels.to_fp8(units)


def plain(codes: Tensor, dtype: torch.dtype, kernels: AttentionKernels) -> Tensor:
    """Returns the values of codes without their scales, exact in float32 and bfloat16."""
    if codes.dtype == torch.int8:
        return codes.to(dtype)
    assert kernels.from_fp8 is not None
    return kernels.from_fp8(codes, dtype)


def values(tokens: CodedTokens, pairs: Tensor | None, dtype: torch.dtype, kernels: AttentionKernels) -> Tensor:
    """Returns the keys or values [n, g, d] of stored tokens, in ``dtype``."""
    found = (plain(tokens.codes, torch.float32, kernels) * tokens.scale.float()[..., None]).to(dtype)
    if tokens.kept is None or pairs is None:
        return found
    index = pairs.long().expand(found.shape[0], -1, -1)
    return found.scatter(2, index, tokens.kept.to(dtype))


def gather_stored(
    kv: LayerKV, block_list: Tensor, size: int, dtype: torch.dtype, kernels: AttentionKernels
) -> list[Tensor]:
    """Returns keys and values [1, g, B x b, d] of the listed blocks."""
    found = []
    for tokens in (
        CodedTokens(kv.k, require_tensor(kv.k_scale), kv.kept),
        CodedTokens(kv.v, require_tensor(kv.v_scale)),
    ):
        listed = CodedTokens(*(None if t is None else blocks(t, block_list, size).flatten(0, 1) for t in tokens))  # type: ignore[arg-type]
        found.append(values(listed, kv.pairs, dtype, kernels).transpose(0, 1)[None])
    return found


def scores(q: Tensor, kv: LayerKV, attn: SharedDecode, size: int, fp32: bool, kernels: AttentionKernels) -> Tensor:
    """Returns scores [B, h, b]: each block's keys times its row's query [R, h, d]."""
    rows, heads, _ = q.shape
    groups = kv.k.shape[1]
    keys = plain(blocks(kv.k, attn.block_list, size), q.dtype, kernels).flatten(2)
    found = times(_spread(q, attn), keys.transpose(1, 2), fp32, kernels)
    found = found * _by_head(require_tensor(kv.k_scale), attn, size, heads, found.dtype)
    if kv.kept is None or kv.pairs is None:
        return found
    index = kv.pairs.long()[:, None].expand(rows, groups, heads // groups, -1)
    few = q.view(rows, groups, heads // groups, -1).gather(3, index).view(rows, heads, -1)
    kept = blocks(kv.kept, attn.block_list, size).flatten(2).to(q.dtype)
    return found + times(_spread(few, attn), kept.transpose(1, 2), fp32, kernels)


def weigh_values(
    share: Tensor, kv: LayerKV, dtype: torch.dtype, attn: SharedDecode, size: int, kernels: AttentionKernels
) -> Tensor:
    """Returns [B, h, d]: each block's values weighted by ``share`` [B, h, b]."""
    groups, d = kv.v.shape[1:]
    share = share * _by_head(require_tensor(kv.v_scale), attn, size, share.shape[1], share.dtype)
    spread = (share.to(dtype)[..., None] * attn.spread_weight).view(-1, share.shape[1], size * groups)
    held = plain(blocks(kv.v, attn.block_list, size), dtype, kernels)
    return weigh(spread, held.view(-1, size * groups, d))


def require_tensor(tensor: Tensor | None) -> Tensor:
    """Returns ``tensor``, which an 8-bit cache always has."""
    assert tensor is not None
    return tensor


def blocks(cache: Tensor, block_list: Tensor, size: int) -> Tensor:
    """Returns the listed blocks of a flat cache: [B, b, g, ...]."""
    return cache.view(-1, size, *cache.shape[1:]).index_select(0, block_list)


def _spread(q: Tensor, attn: SharedDecode) -> Tensor:
    """Returns each block's query [B, h, g x d], with zeros for other KV heads."""
    return (q[:, :, None] * attn.spread_query).view(q.shape[0], q.shape[1], -1).index_select(0, attn.owner)


def _by_head(scale: Tensor, attn: SharedDecode, size: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns the scales of each block's tokens for every query head: [B, h, b]."""
    found = blocks(scale, attn.block_list, size).to(dtype).transpose(1, 2)[:, :, None]
    return found.expand(-1, -1, heads // found.shape[1], -1).reshape(-1, heads, size)
