"""DECODE: one token of each row, over a flat list of blocks; and VERIFY: a few tokens of each.

Each block is attended to by its row's query, then blocks of a row are joined. With m the largest score of a block,
P = exp(S - m), s = sum P and O = P V, and M the largest m of the row, the row's output is
sum(exp(m - M) O) / sum(exp(m - M) s).

One product of a block serves all its heads: a query is spread over the KV heads, with zeros for those that it does not
read, and so are the weights. Products of one head at a time would need keys and values in another order, which is a
second copy of all that was gathered; and the matrix engine takes as long for 4 heads as for 28.

In VERIFY the queries of a row's tokens are further heads of the row: a block is read once for all of them. A token to
which a whole block is hidden has the lowest score there, and so no share of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.backends.hpu.attention import quantised_kv_cache
from trencadis.backends.hpu.attention.attention_input_types import AttentionKernels, BlockDecodeAttn, SharedDecode
from trencadis.backends.hpu.attention.plain_attention import lowest, softmax_mode, times, weigh
from trencadis.core.device.backend import LayerKV


def prepare_decode(
    attn: BlockDecodeAttn, heads: int, groups: int, size: int, fp32: bool, dtype: torch.dtype, window: int = 0
) -> SharedDecode:
    """Computes what all layers share, for ``heads`` query heads over ``groups`` KV heads, which are multiplied in
    ``dtype``, in blocks of ``size`` tokens.
    """
    device = attn.slot.device
    each = tokens_of(attn)
    rows, heads = attn.slot.shape[0] // each, heads * each
    kind = torch.float32 if fp32 else dtype
    row = torch.arange(rows, device=device, dtype=torch.int32)
    # Every result has memory of its own: a view that leaves a compiled region would be taken eagerly.
    hidden = hidden_tokens(attn, size, window).to(kind) * lowest(kind)
    group = torch.arange(groups, device=device, dtype=torch.int32)
    reader = group[:, None].expand(-1, heads // groups).reshape(-1, 1, 1)
    return SharedDecode(
        attn.slot,
        attn.block_list,
        attn.group.clamp_max(rows - 1),
        attn.group.long(),
        attn.group.masked_fill(attn.group == rows, -1),
        hidden,
        (row[:, None] == attn.group).to(kind),
        (reader == group[:, None]).to(dtype),
        (reader == group).to(dtype),
    )


def tokens_of(attn: BlockDecodeAttn) -> int:
    """Returns the tokens of a row: 1 in DECODE."""
    return attn.usage.shape[1] if attn.usage.dim() > 1 else 1


def hidden_tokens(attn: BlockDecodeAttn, size: int, window: int) -> Tensor:
    """Returns bool [B, 1, b], in VERIFY [B, 1, T, 1, b]: tokens of a block that its row must not attend to: those
    after the row's end, or before its window.
    """
    position = torch.arange(size, device=attn.usage.device, dtype=torch.int32)
    hidden = position >= _before_tokens(attn.usage)
    if not window:
        return hidden
    assert attn.rest is not None, "a model with windows has this input"
    return hidden | (_before_tokens(attn.rest) - position > window)


def _before_tokens(x: Tensor) -> Tensor:
    """Returns x [B] as [B, 1, 1], and x [B, T] as [B, 1, T, 1, 1]."""
    return x[:, None, None] if x.dim() == 1 else x[:, None, :, None, None]


def attend_decode(
    q: Tensor, kv: LayerKV, attn: SharedDecode, size: int, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Computes attention [R, h, d] of one token per row, or [R x T, h, d] of T tokens.

    Keys are freed before values are gathered, so each step is a function of its own.
    """
    if attn.bias.dim() > 3:
        return _attend_verified(q, kv, attn, size, scale, fp32, kernels)
    if kernels.decode_parts and kernels.parts is not None and kv.k_scale is None:
        return _attend_by_parts(q, kv, attn, size, scale, fp32, kernels)
    product = quantised_kv_cache.scores if kv.k_scale is not None else _scores
    # Scores get no name here, so that they are freed before values are gathered.
    return _join_scores(
        q, torch.add(attn.bias, product(q, kv, attn, size, fp32, kernels), alpha=scale), kv, attn, size, kernels
    )


def _attend_verified(
    q: Tensor, kv: LayerKV, attn: SharedDecode, size: int, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Computes ``attend_decode`` of a row's tokens as of so many heads more."""
    groups, each = attn.spread_query.shape[1], attn.bias.shape[2]
    (count, heads, d), blocks = q.shape, attn.bias.shape[0]
    rows = count // each
    folded = q.view(rows, each, groups, heads // groups, d).transpose(1, 2).reshape(rows, each * heads, d)
    product = quantised_kv_cache.scores if kv.k_scale is not None else _scores

    def visible_scores() -> Tensor:
        found = product(folded, kv, attn, size, fp32, kernels).view(blocks, groups, each, heads // groups, size)
        return torch.add(attn.bias, found, alpha=scale).view(blocks, each * heads, size)

    if kernels.sinks is not None:
        sinks = kernels.sinks.view(groups, 1, -1).repeat(1, each, 1).view(-1)
        kernels = kernels._replace(sinks=sinks)
    out = _join_scores(folded, visible_scores(), kv, attn, size, kernels)
    return out.view(rows, groups, each, heads // groups, d).transpose(1, 2).reshape(count, heads, d)


def _join_scores(
    q: Tensor, scores: Tensor, kv: LayerKV, attn: SharedDecode, size: int, kernels: AttentionKernels
) -> Tensor:
    """Returns [R, h, d]: the values of each row's blocks weighted by ``scores`` [B, h, b]."""
    high = scores.amax(-1, keepdim=True)
    share = (scores - high).exp()
    total = share.sum(-1, keepdim=True)
    del scores
    if kv.k_scale is not None:
        part = quantised_kv_cache.weigh_values(share, kv, q.dtype, attn, size, kernels)
    else:
        part = _weigh_values(share, kv.v, attn, size)
    if kernels.adjustment is not None and high.dtype != torch.float16:
        return _join_blocks_fused(part, high, total, attn, kernels).to(q.dtype)
    return _join_blocks(part, high, total, attn, kernels.sinks).to(q.dtype)


def _attend_by_parts(
    q: Tensor, kv: LayerKV, attn: SharedDecode, size: int, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Attends to each block by the fused kernel, which returns the statistics that join the blocks of a row."""
    assert kernels.parts is not None
    queries = q.index_select(0, attn.owner)[:, :, None]  # [B, h, 1, d]
    keys, values = (
        cache.view(-1, size, *cache.shape[1:]).index_select(0, attn.block_list).transpose(1, 2) for cache in kv[:2]
    )
    visible = (attn.bias == 0)[:, None]
    mode = softmax_mode(q.dtype, fp32, "fast")
    part, high, inverse = (
        t[:, :, 0] for t in kernels.parts(queries, keys, values, visible, False, scale, mode)
    )  # [B, h, d], [B, h, 1] twice
    kind = attn.mapping.dtype
    total = inverse.to(kind).reciprocal()
    return _join_blocks(part.to(kind) * total, high.to(kind), total, attn).to(q.dtype)


def _scores(q: Tensor, kv: LayerKV, attn: SharedDecode, size: int, fp32: bool, kernels: AttentionKernels) -> Tensor:
    """Returns scores [B, h, b]: each block's keys times its row's query, which has zeros for other KV heads."""
    queries = (q[:, :, None] * attn.spread_query).view(q.shape[0], q.shape[1], -1).index_select(0, attn.owner)
    keys = kv.k.view(-1, size, queries.shape[2]).index_select(0, attn.block_list)
    return times(queries, keys.transpose(1, 2), fp32, kernels)


def _weigh_values(share: Tensor, cache: Tensor, attn: SharedDecode, size: int) -> Tensor:
    """Returns [B, h, d]: each block's values weighted by ``share`` [B, h, b], with zeros for other KV heads."""
    groups, d = cache.shape[1:]
    spread = (share.to(cache.dtype)[..., None] * attn.spread_weight).view(-1, share.shape[1], size * groups)
    values = cache.view(-1, size * groups, d).index_select(0, attn.block_list)
    return weigh(spread, values)


def _join_blocks(part: Tensor, high: Tensor, total: Tensor, attn: SharedDecode, sinks: Tensor | None = None) -> Tensor:
    """Joins blocks [B, h, d], with their maxima and sums [B, h, 1], into rows [R, h, d]; ``sinks``: float32 [h]."""
    rows, (_, heads, d) = attn.mapping.shape[0], part.shape
    if sinks is None:
        best = torch.full((rows + 1, heads, 1), lowest(high.dtype), dtype=high.dtype, device=high.device)
    else:
        best = sinks.to(high.dtype).view(1, heads, 1).repeat(rows + 1, 1, 1)
    best.index_reduce_(0, attn.group, high, "amax")
    factor = (high - best.index_select(0, attn.group)).exp()
    above = attn.mapping @ (part * factor).view(-1, heads * d)
    below = attn.mapping @ (total * factor).view(-1, heads)
    below = below.view(rows, heads, 1)
    if sinks is not None:
        below = below + (sinks.to(high.dtype).view(1, heads, 1) - best[:rows]).exp()
    return above.view(rows, heads, d) / below.clamp_min(torch.finfo(high.dtype).tiny)


def _join_blocks_fused(
    part: Tensor, high: Tensor, total: Tensor, attn: SharedDecode, kernels: AttentionKernels
) -> Tensor:
    """Does the same as ``_join_blocks`` by the fused kernel, which takes heads in two dimensions."""
    assert kernels.adjustment is not None
    rows, groups, (blocks, heads, d) = attn.mapping.shape[0], attn.spread_query.shape[1], part.shape
    shape = [blocks, groups, heads // groups, 1, 1]
    factor = kernels.adjustment(high.view(shape), total.view(shape), attn.unlisted, rows, shape)
    return (attn.mapping @ (part * factor.view(blocks, heads, 1)).view(-1, heads * d)).view(rows, heads, d)
