"""Attention over rectangles: prompts without and with context, decoding over a flat list of blocks, pictures.

Letters: R rows, T tokens of a row, B listed blocks of b tokens, h query heads, g KV heads, d head size. Nothing here
reads a value on the host, and no score row is ever fully masked: every row sees at least a key of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.backend import LayerKV, Segments
from trencadis.core.layout import WINDOW_SLOTS

QUERY_TILE = 1024
"""Queries whose mask, or scores, exist at a time."""

SCORES = QUERY_TILE * 8192
"""Scores of a head that exist at a time where no fused kernel hides them: tiles get shorter over long rows."""

CUT_TILES = 64
"""Tiles between two graph cuts."""

Fused = Callable[..., Tensor]
Cut = Callable[[], None]


class FreshAttn(NamedTuple):
    """FRESH: R rows of T tokens that nothing precedes."""

    slot: Tensor  # int64 [n] cache slot that stores the token; one of SINK for padding
    own: Tensor  # int32 [n] cache slot to read the token from; a slot of ZERO for padding
    length: Tensor  # int32 [R] real tokens of each row


class ContextAttn(NamedTuple):
    """CONTEXT: one row of T tokens after ``attend_context`` stored ones."""

    slot: Tensor  # int64 [T]
    own: Tensor  # int32 [T]
    block_list: Tensor  # int32 [B] blocks of the stored tokens, in order; ZERO beyond them
    context: Tensor  # int32 [1] stored tokens


class BlockDecodeAttn(NamedTuple):
    """DECODE: one token of each of R rows."""

    slot: Tensor  # int64 [R]
    block_list: Tensor  # int32 [B] blocks of all rows, one after the other; ZERO beyond them
    group: Tensor  # int32 [B] row that the block belongs to; R beyond them
    usage: Tensor  # int32 [B] tokens of the block that the row sees, at least 1


def lowest(t: Tensor) -> float:
    """What masked scores become: finite."""
    return torch.finfo(t.dtype).min


def attend_fresh(q: Tensor, kv: LayerKV, attn: FreshAttn, scale: float, fp32: bool, fused: Fused | None) -> Tensor:
    """[n, h, d]: causal inside each row. Padding comes last in a row, so causality hides it from real tokens."""
    rows = attn.length.shape[0]
    queries = q.view(rows, -1, *q.shape[1:]).transpose(1, 2)
    keys, values = (cache.index_select(0, attn.own).view(rows, -1, *cache.shape[1:]).transpose(1, 2) for cache in kv)
    if fused is not None:
        mode = "fp32" if fp32 else "fast"
        out = fused(queries, keys, values, None, 0.0, True, scale, mode, True, None, "right")
    else:
        out = _causal(queries, keys, values, scale, fp32)
    return out.transpose(1, 2).reshape(q.shape)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, fp32: bool) -> Tensor:
    """[R, h, T, d] in tiles of queries, each over the keys up to its end."""
    count = q.shape[2]
    place = torch.arange(count, device=q.device, dtype=torch.int32)
    tile = _tile(count)
    out = []
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        hidden = place[:stop] > place[start:stop, None]
        out.append(_attend(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], hidden, scale, fp32))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _tile(keys: int) -> int:
    return max(min(QUERY_TILE, SCORES // keys // 64 * 64), 64)


def attend_context(
    q: Tensor, kv: LayerKV, attn: ContextAttn, size: int, scale: float, fp32: bool, fused: Fused | None
) -> Tensor:
    """[T, h, d]: the listed blocks up to ``attend_context``, then the chunk's own tokens, causal."""
    count = q.shape[0]
    stored = attn.block_list.shape[0] * size
    queries = q.transpose(0, 1)[None]
    keys, values = (
        torch.cat([_blocks(cache, attn.block_list, size).flatten(0, 1), cache.index_select(0, attn.own)])
        for cache in kv
    )
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    place = torch.arange(count, device=q.device, dtype=torch.int32)
    before = torch.arange(stored, device=q.device, dtype=torch.int32) >= attn.context
    tile = _tile(stored + count) if fused is None else QUERY_TILE
    out = []
    for start in range(0, count, tile):
        own = place > place[start : start + tile, None]
        hidden = torch.cat([before.expand(own.shape[0], -1), own], dim=1)
        some = queries[:, :, start : start + tile]
        if fused is None:
            out.append(_attend(some, keys, values, hidden, scale, fp32))
        else:
            mode = "fp32" if fp32 else "fast"
            out.append(fused(some, keys, values, ~hidden[None, None], 0.0, False, scale, mode))
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def attend_decode(q: Tensor, kv: LayerKV, attn: BlockDecodeAttn, size: int, scale: float, fp32: bool) -> Tensor:
    """[R, h, d] over a flat list: each block is attended to by its row's query, then blocks of a row are joined.

    With m the largest score of a block, P = exp(S - m), s = sum P and O = P V, and M the largest m of the row:
    the row's output is sum(exp(m - M) O) / sum(exp(m - M) s).
    """
    rows, heads, d = q.shape
    groups = kv.k.shape[1]
    width = (groups, heads // groups)
    extra = functional.pad(q, (0, 0, 0, 0, 0, 1))
    queries = extra.index_select(0, attn.group).view(-1, *width, d)
    keys, values = (_blocks(cache, attn.block_list, size).transpose(1, 2) for cache in kv)  # [B, g, b, d]
    scores = queries @ keys.transpose(2, 3) * scale
    if fp32:
        scores = scores.float()
    place = torch.arange(keys.shape[2], device=q.device, dtype=torch.int32)
    hidden = place >= attn.usage[:, None]
    scores = scores.masked_fill(hidden[:, None, None], lowest(scores))
    high = scores.amax(-1)  # [B, g, h / g]
    weights = (scores - high[..., None]).exp()
    total = weights.sum(-1)
    part = weights.to(values.dtype) @ values  # [B, g, h / g, d]
    best = torch.full((rows + 1, *width), lowest(high), dtype=high.dtype, device=q.device)
    best.index_reduce_(0, attn.group.long(), high, "amax")
    share = (high - best.index_select(0, attn.group)).exp()
    owner = torch.arange(rows, device=q.device, dtype=torch.int32)[:, None] == attn.group  # [R, B]
    mapping = owner.to(high.dtype)
    joined = mapping @ (share[..., None] * part.to(high.dtype)).flatten(1)
    below = mapping @ (share * total).flatten(1)
    out = joined.view(rows, heads, d) / below.view(rows, heads, 1).clamp_min(torch.finfo(high.dtype).tiny)
    return out.to(q.dtype)


def attend_windows(q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float, fp32: bool) -> Tensor:
    """[s, h, d]: attention on [W, h, 64, d]; the padding of a window is masked as keys."""
    shape = (-1, WINDOW_SLOTS, *q.shape[1:])
    queries, keys, values = (t.view(shape).transpose(1, 2) for t in (q, k, v))
    place = torch.arange(WINDOW_SLOTS, device=q.device, dtype=torch.int32)
    hidden = (place >= seg.real[:, None])[:, None, None]
    return _attend(queries, keys, values, hidden, scale, fp32).transpose(1, 2).reshape(q.shape)


def attend_images(
    q: Tensor, k: Tensor, v: Tensor, seg: Segments, scale: float, fp32: bool, fused: Fused | None, cut: Cut
) -> Tensor:
    """[s, h, d]: whole pictures, a tile of queries at a time, each with a mask made in the graph."""
    count = q.shape[0]
    owner, real = (t[:, None].expand(-1, WINDOW_SLOTS).reshape(count) for t in seg)
    place = torch.arange(count, device=q.device, dtype=torch.int32) % WINDOW_SLOTS
    unreal = place >= real
    queries, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = []
    for tile, start in enumerate(range(0, count, QUERY_TILE)):
        if tile and tile % CUT_TILES == 0:
            cut()
        stop = min(start + QUERY_TILE, count)
        hidden = (owner[start:stop, None] != owner) | unreal
        some = queries[:, :, start:stop]
        if fused is None:
            out.append(_attend(some, keys, values, hidden, scale, fp32))
        else:
            seen = ~hidden[None, None]
            out.append(fused(some, keys, values, seen, 0.0, False, scale, "fp32" if fp32 else "None"))
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary where the plug-in has no kernel for it: the first half of the head against the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _blocks(cache: Tensor, block_list: Tensor, size: int) -> Tensor:
    """[B, b, g, d]: the listed blocks of a flat cache."""
    return cache.view(-1, size, *cache.shape[1:]).index_select(0, block_list)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, fp32: bool) -> Tensor:
    """[R, h, S, d] over [R, g, T, d]; query heads that share a KV head are folded beside its queries."""
    rows, heads, count, d = q.shape
    groups = k.shape[1]
    repeat = heads // groups
    folded = q.reshape(rows, groups, repeat, count, d)
    scores = folded @ k[:, :, None].transpose(3, 4) * scale
    if fp32:
        scores = scores.float()
    mask = hidden if hidden.dim() == 2 else hidden[:, :, None]
    weights = scores.masked_fill(mask, lowest(scores)).softmax(-1).to(v.dtype)
    return (weights @ v[:, :, None]).reshape(rows, heads, count, d)
