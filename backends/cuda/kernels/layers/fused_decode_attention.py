"""Decode attention fused with rotary, head norms, and the store of keys and values.

Work items and their join are those of ``paged_attention``. Every program rotates the queries that it needs. The one
whose piece contains the row's new token rotates that key, stores it with its value, and adds it to the softmax from
registers, after the stored keys: no launch reads what it writes to the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import online_softmax, paged_attention, tile_sizes
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn, SingleAttn
from trencadis.backends.cuda.kernels.layers import dependent_launch
from trencadis.backends.cuda.kernels.layers.dependent_launch import wait
from trencadis.backends.cuda.kernels.paged_attention import QueryTile, attend_part, leave_part
from trencadis.backends.cuda.kernels.paged_attention_loop import KeyRanges, PagedKeys
from trencadis.core.device.backend import LayerKV, Rotary


class HeadNorms(NamedTuple):
    """RMS norms of the heads of queries and of keys, [d] each."""

    queries: Tensor
    keys: Tensor
    eps: float


class AttentionForm(NamedTuple):
    """How the heads of a layer attend.

    Args:
        scale: factor of the scores.
        window: keys that a token sees, itself included; 0: all.
        gated: True if d values follow each query, whose sigmoid the head's output is multiplied by.
        sinks: float32 [heads], a score of each that takes part in the softmax without a value; None: there are none.
    """

    scale: float
    window: int = 0
    norms: HeadNorms | None = None
    gated: bool = False
    sinks: Tensor | None = None


def attend(qkv: Tensor, rotary: Rotary, kv: LayerKV, attn: SingleAttn, form: AttentionForm) -> Tensor:
    """Computes attention [n, heads x d] of rows of one token each; surplus tokens get 0, and store nothing.

    ``qkv``: [n, (heads + 2 x KV heads) x d], with gates [n, 2 x (heads + KV heads) x d], contiguous, of kv's type.
    """
    scale, window, norms, gated, sinks = form
    n, (groups, d) = qkv.shape[0], kv.k.shape[2:]
    q, gate = split_queries(qkv, groups, d, gated)
    heads = q.shape[1]
    check_inputs(qkv, rotary, kv, attn, q)
    out = qkv.new_empty(n, heads, d)
    partial = paged_attention.partial(attn, q, kv)
    tile = tile_sizes.pick("attend_decode", q, heads // groups)
    depends = dependent_launch.possible(qkv.device)
    normed = norms is not None
    stages = max(tile.stages - (window > 0), 1)  # with all stages the loop at the window's edge spills on sm_90
    turned_items_kernel[(groups, attn.item_row.shape[0])](
        out, partial.values, partial.weight, qkv, rotary.cos, rotary.sin, norms.queries if norms else qkv,
        norms.keys if norms else qkv, qkv if sinks is None else sinks, kv.k, kv.v, attn.slot_map, attn.row_start,
        attn.context, attn.blocks, attn.block_start, attn.item_row, attn.item_token, attn.item_begin,
        attn.item_stop, attn.item_part, attn.context.shape[0], scale * online_softmax.LOG2E.value,
        norms.eps if norms else 0.0,
        GROUP=heads // groups, GROUPS=groups, D=d, LANES=tile_sizes.lanes(d), M=tile.m, N=tile.n, BLOCK=kv.k.shape[1],
        PART=partial.weight.shape[3], WINDOW=window, NORMED=normed, GATED=gated,
        SINKS=sinks is not None, DEPENDENT=depends,
        num_warps=tile.warps, num_stages=stages, **dependent_launch.options(depends),
    )  # fmt: skip
    paged_attention.join(partial, attn, q, kv, out, alike=False, depends=depends, gate=gate, sinks=sinks)
    return out.view(n, heads * d)


def split_queries(qkv: Tensor, groups: int, d: int, gated: bool) -> tuple[Tensor, Tensor | None]:
    """Returns views of the queries and of their gates, if ``gated``, [n, heads, d] each."""
    queries = qkv[:, : -2 * groups * d]
    if not gated:
        return queries.view(len(qkv), -1, d), None
    q, gate = queries.view(len(qkv), -1, 2, d).unbind(2)
    return q, gate


def check_inputs(qkv: Tensor, rotary: Rotary, kv: LayerKV, attn: ItemAttn, q: Tensor) -> None:
    """Asserts the shapes and dtypes that kernels of fused attention rely on; ``q`` are the queries of ``qkv``."""
    d, groups = kv.k.shape[3], kv.k.shape[2]
    assert qkv.is_contiguous() and q.shape[1] % groups == 0, (qkv.shape, q.shape)
    assert kv.k.is_contiguous() and kv.v.is_contiguous() and kv.k.dtype == kv.v.dtype == qkv.dtype
    for t in (rotary.cos, rotary.sin):
        assert t.shape == (qkv.shape[0], d) and t.is_contiguous()
    assert kv.k_scale is None and attn.upto is None and attn.slot_map.shape == qkv.shape[:1]


@triton.jit(do_not_specialize=["rows", "eps"])
def turned_items_kernel(
    out, part, weight, qkv, cos, sin, q_norm, k_norm, sinks, k, v, slot_map, row_start, context, blocks, block_start,
    item_row, item_token, item_begin, item_stop, item_part, rows, scale, eps,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr, WINDOW: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes one item of a KV head. ``rows`` includes the surplus row, which is the last and has no keys."""
    PITCH: tl.constexpr = 2 * D if GATED else D
    QUERIES: tl.constexpr = GROUPS * GROUP * PITCH
    if DEPENDENT:
        wait()
    group = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(item_row + item)
    if row < 0:
        return
    token = tl.load(item_token + item)
    before = tl.load(context + row)
    begin = tl.load(item_begin + item)
    limit = tl.where(row < rows - 1, tl.load(item_stop + item), 0)
    part_at = tl.load(item_part + item)
    newest = (begin <= before) & (before < limit)
    position = (tl.load(row_start + row) + token).to(tl.int64)
    lane = tl.arange(0, M)
    live = lane < GROUP
    head = group * GROUP + lane
    dim = tl.arange(0, LANES)
    source = qkv + position * (QUERIES + 2 * GROUPS * D)
    queries = norm_and_rotate(
        source, head * PITCH, live, cos + position * D, sin + position * D, q_norm, eps, D, LANES, NORMED
    )  # fmt: skip
    tile = QueryTile(queries, lane, live, position + lane * 0, lane * 0 + token, head, token, token + 1)
    reach = _stored_reach(before, begin, limit, N, WINDOW)
    keys = PagedKeys(k + group * D, v + group * D, blocks + tl.load(block_start + row), reach.stop)
    run = attend_part(
        reach, keys, queries, 0, scale, M, N, BLOCK, GROUPS * D, D, LANES, WINDOW, True, 0, 0
    )  # fmt: skip
    one = tl.arange(0, 1)
    key = norm_and_rotate(
        source, QUERIES + (group + one) * D, one < tl.where(newest, 1, 0), cos + position * D, sin + position * D,
        k_norm, eps, D, LANES, NORMED,
    )  # fmt: skip
    inside = (dim < tl.where(newest, D, 0))[None, :]
    own = QUERIES + (GROUPS + group) * D
    value = tl.load(source + own + dim[None, :], mask=inside, other=0.0)
    slot = tl.load(slot_map + position)
    at = (slot * GROUPS + group) * D + dim[None, :]
    tl.store(k + at, key, mask=inside)
    tl.store(v + at, value, mask=inside)
    score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
    more = tl.broadcast_to(value.to(tl.float32), (M, LANES))
    high = tl.where(newest, score, online_softmax.LOWEST)
    size = tl.where(newest, tl.full([M], 1.0, tl.float32), 0.0)
    acc, peak, total = online_softmax.join(run.acc, run.peak, run.total, more, high, size)
    if part_at >= 0:
        leave_part(part, weight, (part_at.to(tl.int64) * GROUPS + group) * PART, tile, acc, peak, total, PART, D, LANES)
    else:
        if SINKS:
            total = online_softmax.add_sink(total, peak, tl.load(sinks + head, mask=live, other=0.0))
        mean = online_softmax.finish(acc, total).to(out.dtype.element_ty)
        to = position * (GROUPS * GROUP * D) + (head * D)[:, None] + dim[None, :]
        there = live[:, None] & (dim < D)[None, :]
        if GATED:
            mean = online_softmax.gate_mean(mean, source + (head * PITCH + D)[:, None] + dim[None, :], there)
        tl.store(out + to, mean, mask=there)


@triton.jit
def norm_and_rotate(
    source, at, live, cos, sin, norm, eps, D: tl.constexpr, LANES: tl.constexpr, NORMED: tl.constexpr,
    EACH: tl.constexpr = False,
):  # fmt: skip
    """Returns [heads, LANES] normed and rounded if NORMED, then rotated and rounded.

    ``source``, ``cos`` and ``sin`` point to the rows of one token, or if EACH [heads, 1] to those of a token a head;
    ``at`` [heads] are the places of the heads in a row.
    """
    HALF: tl.constexpr = D // 2
    dim = tl.arange(0, LANES)
    far = tl.where(dim < HALF, dim + HALF, dim - HALF)
    inside = live[:, None] & (dim < D)[None, :]
    held = tl.load(source + at[:, None] + dim[None, :], mask=inside, other=0.0)
    across = tl.load(source + at[:, None] + far[None, :], mask=inside, other=0.0)
    near = held.to(tl.float32)
    other = across.to(tl.float32)
    if NORMED:
        size = tl.rsqrt(tl.sum(near * near, 1) / D + eps)[:, None]
        own = tl.load(norm + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        theirs = tl.load(norm + far, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        near = (near * size * own).to(held.dtype).to(tl.float32)
        other = (other * size * theirs).to(held.dtype).to(tl.float32)
    if EACH:
        cosine = tl.load(cos + dim[None, :], mask=(dim < D)[None, :], other=0.0)
        sine = tl.load(sin + dim[None, :], mask=(dim < D)[None, :], other=0.0)
    else:
        cosine = tl.load(cos + dim, mask=dim < D, other=0.0)[None, :]
        sine = tl.load(sin + dim, mask=dim < D, other=0.0)[None, :]
    sine = tl.where((dim < HALF)[None, :], -sine, sine)
    return (near * cosine + other * sine).to(held.dtype)


@triton.jit
def _stored_reach(before, begin, limit, N: tl.constexpr, WINDOW: tl.constexpr):
    """Returns the ``KeyRanges`` of one token among the ``before`` stored keys, from ``begin`` to ``limit``."""
    stop = tl.minimum(before, limit)
    first = 0
    edge = begin
    if WINDOW > 0:
        first = before - WINDOW + 1
        begin = tl.maximum(begin, tl.maximum(first, 0) // N * N)
        edge = tl.maximum(begin, (tl.maximum(first, 0) + N - 1) // N * N)
    return KeyRanges(begin, edge, stop, stop, first, stop - 1)
