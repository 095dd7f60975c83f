"""Attention of rows of several tokens fused with rotary, head norms, and the store of keys and values.

It serves launches of up to ``skinny_gemm.FEW`` tokens: VERIFY, and the smallest prompts. Work items, their blocks of
queries and their join are those of ``paged_attention``, so that a stored key is read once for all tokens of a block.
The new keys of a row, at most NEW, are one more tile: every program rotates those that its queries see. The program
whose queries and piece of keys hold a token stores its key and value: no launch reads what it writes to the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import online_softmax, paged_attention, tile_sizes
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn, SingleAttn
from trencadis.backends.cuda.kernels.layers import dependent_launch
from trencadis.backends.cuda.kernels.layers.dependent_launch import wait
from trencadis.backends.cuda.kernels.layers.fused_decode_attention import (
    AttentionForm,
    check_inputs,
    norm_and_rotate,
    split_queries,
)
from trencadis.backends.cuda.kernels.paged_attention import QueryTile, attend_part, leave_part
from trencadis.backends.cuda.kernels.paged_attention_loop import KeyRanges, PagedKeys
from trencadis.backends.cuda.kernels.tile_sizes import Tile
from trencadis.core.device.backend import LayerKV, Rotary

NEW: tl.constexpr = tl.constexpr(16)
"""Most tokens of a row, and so the width of the tile of new keys; a product needs at least as many."""


def attend(
    qkv: Tensor, rotary: Rotary, kv: LayerKV, attn: ItemAttn, form: AttentionForm, planned: int = 0
) -> Tensor:  # fmt: skip
    """Computes attention [n, heads x d] of rows of any number of tokens; surplus tokens get 0, and store nothing.

    Args:
        qkv: as for ``fused_decode_attention.attend``; n is at most ``NEW``.
        planned: query heads per KV head by which ``attn`` was planned, if layers differ; 0: those of this layer.
    """
    scale, window, norms, gated, sinks = form
    n, (groups, d) = qkv.shape[0], kv.k.shape[2:]
    q, gate = split_queries(qkv, groups, d, gated)
    heads = q.shape[1]
    group = heads // groups
    assert len(qkv) <= NEW.value and not isinstance(attn, SingleAttn), "more tokens than the tile of new keys"
    check_inputs(qkv, rotary, kv, attn, q)
    out = qkv.new_empty(n, heads, d)
    partial = paged_attention.partial(attn, q, kv)
    tile = _tile_of(q, group)
    lanes = paged_attention.block_lanes(attn, n, alike=False)
    each = max(lanes // (planned or group), 1)
    subs = -(-min(lanes, each * group) // tile.m)
    depends = dependent_launch.possible(qkv.device)
    normed = norms is not None
    verify_items_kernel[(groups * subs, attn.item_row.shape[0])](
        out, partial.values, partial.weight, qkv, rotary.cos, rotary.sin, norms.queries if norms else qkv,
        norms.keys if norms else qkv, qkv if sinks is None else sinks, kv.k, kv.v, attn.slot_map, attn.row_start,
        attn.context, attn.blocks, attn.block_start, attn.item_row, attn.item_token, attn.item_begin,
        attn.item_stop, attn.item_part, attn.context.shape[0], scale * online_softmax.LOG2E.value,
        norms.eps if norms else 0.0,
        GROUP=group, GROUPS=groups, D=d, LANES=tile_sizes.lanes(d), M=tile.m, N=tile.n, BLOCK=kv.k.shape[1],
        TOKENS=each, SUBS=subs, PART=partial.weight.shape[3], WINDOW=window, NORMED=normed,
        GATED=gated, SINKS=sinks is not None, DEPENDENT=depends,
        num_warps=tile.warps, num_stages=tile.stages, **dependent_launch.options(depends),
    )  # fmt: skip
    paged_attention.join(
        partial, attn, q, kv, out, alike=False, depends=depends, planned=planned, gate=gate, sinks=sinks
    )
    return out.view(n, heads * d)


def _tile_of(q: Tensor, group: int) -> Tile:
    """Returns the tile of short blocks of ``paged_attention``, over more warps and for large heads with fewer queries:
    rotating queries with an angle each takes more registers than attending to their keys.
    """
    tile = tile_sizes.pick("attend_prefill", q, group, "short")
    return tile._replace(m=16 if q.shape[2] > 128 else tile.m, warps=8 if q.shape[2] > 64 else tile.warps)


@triton.jit(do_not_specialize=["rows", "eps"])
def verify_items_kernel(
    out, part, weight, qkv, cos, sin, q_norm, k_norm, sinks, k, v, slot_map, row_start, context, blocks, block_start,
    item_row, item_token, item_begin, item_stop, item_part, rows, scale, eps,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, SUBS: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes one tile of an item. ``rows`` includes the surplus row, which is the last and has no keys."""
    PITCH: tl.constexpr = 2 * D if GATED else D
    QUERIES: tl.constexpr = GROUPS * GROUP * PITCH
    WIDTH: tl.constexpr = QUERIES + 2 * GROUPS * D
    if DEPENDENT:
        wait()
    group = tl.program_id(0) // SUBS
    sub = tl.program_id(0) % SUBS * M
    item = tl.program_id(1)
    row = tl.load(item_row + item)
    if row < 0:
        return
    token = tl.load(item_token + item)
    start = tl.load(row_start + row)
    count = tl.load(row_start + row + 1) - start
    if token + sub // GROUP >= count:
        return
    before = tl.load(context + row)
    begin = tl.load(item_begin + item)
    limit = tl.where(row < rows - 1, tl.load(item_stop + item), 0)
    dim = tl.arange(0, LANES)
    lane = sub + tl.arange(0, M)
    own = token + lane // GROUP
    live = (lane // GROUP < TOKENS) & (own < count)
    below = tl.minimum(token + tl.minimum((sub + M - 1) // GROUP + 1, TOKENS), count)
    head = group * GROUP + lane % GROUP
    position = (start + tl.where(live, own, token)).to(tl.int64)
    turn = (position * D)[:, None]
    source = qkv + (position * WIDTH)[:, None]
    queries = norm_and_rotate(source, head * PITCH, live, cos + turn, sin + turn, q_norm, eps, D, LANES, NORMED, True)
    tile = QueryTile(queries, lane, live, position, own, head, token + sub // GROUP, below)
    reach = _stored_reach(tile, before, begin, limit, N, WINDOW)
    keys = PagedKeys(k + group * D, v + group * D, blocks + tl.load(block_start + row), reach.stop)
    run = attend_part(reach, keys, queries, 0, scale, M, N, BLOCK, GROUPS * D, D, LANES, WINDOW, True, 0, 0)
    new = tl.arange(0, NEW)
    there = (new < below) & (before + new >= begin) & (before + new < limit)
    place = (start + tl.where(there, new, 0)).to(tl.int64)
    key_at = QUERIES + group * D + new * 0
    turn = (place * D)[:, None]
    source = qkv + (place * WIDTH)[:, None]
    key = norm_and_rotate(source, key_at, there, cos + turn, sin + turn, k_norm, eps, D, LANES, NORMED, True)
    inside = there[:, None] & (dim < D)[None, :]
    value = tl.load(source + (key_at + GROUPS * D)[:, None] + dim[None, :], mask=inside, other=0.0)
    first_lane = (new - token) * GROUP  # the tile that has a token's first query stores its key
    stores = there & (first_lane >= sub) & (first_lane < sub + M)
    slot = tl.load(slot_map + place, mask=stores, other=0)
    at = ((slot * GROUPS + group) * D)[:, None] + dim[None, :]
    tl.store(k + at, key, mask=stores[:, None] & (dim < D)[None, :])
    tl.store(v + at, value, mask=stores[:, None] & (dim < D)[None, :])
    seen = there[None, :] & (new[None, :] <= own[:, None])
    if WINDOW > 0:
        seen = seen & (new[None, :] > own[:, None] - WINDOW)
    acc, peak, total = online_softmax.attend_tile(
        run.acc, run.peak, run.total, queries, tl.trans(key), value, seen, scale, True
    )
    part_at = tl.load(item_part + item)
    if part_at >= 0:
        leave_part(part, weight, (part_at.to(tl.int64) * GROUPS + group) * PART, tile, acc, peak, total, PART, D, LANES)
    else:
        if SINKS:
            total = online_softmax.add_sink(total, peak, tl.load(sinks + head, mask=live, other=0.0))
        mean = online_softmax.finish(acc, total).to(out.dtype.element_ty)
        to = (position * (GROUPS * GROUP * D))[:, None] + (head * D)[:, None] + dim[None, :]
        shown = live[:, None] & (dim < D)[None, :]
        if GATED:
            gate = qkv + (position * WIDTH + head * PITCH + D)[:, None] + dim[None, :]
            mean = online_softmax.gate_mean(mean, gate, shown)
        tl.store(out + to, mean, mask=shown)


@triton.jit
def _stored_reach(tile, before, begin, limit, N: tl.constexpr, WINDOW: tl.constexpr):
    """Returns the ``KeyRanges`` of a tile of queries among the ``before`` stored keys, from ``begin`` to ``limit``."""
    stop = tl.minimum(before, limit)
    first = 0
    edge = begin
    if WINDOW > 0:
        first = (before + tile.token - WINDOW + 1)[:, None]
        begin = tl.maximum(begin, tl.maximum(before + tile.top - WINDOW + 1, 0) // N * N)
        edge = tl.maximum(begin, (tl.maximum(before + tile.below - WINDOW, 0) + N - 1) // N * N)
    return KeyRanges(begin, edge, stop, stop, first, stop - 1)
