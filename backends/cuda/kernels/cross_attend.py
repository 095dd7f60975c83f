"""Cross-attention to the rows of images, which the kernel reads directly from the image arena.

A row of the arena holds keys and values of all layers that use cross-attention, so that those of one layer lie a whole
row from each other. The tokens of a block may be of different requests: how far each sees into each image is data, and
an image that a token does not see changes none of its bits, whatever it holds. Items attend to each span of IMAGE_SPAN
rows by itself; the results of several spans are joined in one order, by the program that has them all or by a second
kernel, so that a token has the same bits wherever its images are cut. Grids: (KV heads times tiles of a block, items)
and (KV heads times slabs, joins), fixed by the bucket; unused programs end at once.

For an image that counts several times, the logarithm of the count is added to the scores of all its rows, by adding it
to the largest of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import attention_metadata, online_softmax, tile_sizes
from trencadis.backends.cuda.kernels.attention_metadata import CrossAttentionItems, SingleCrossAttention
from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import DRAWN, IMAGE_SPAN, cross_attention_lanes

SLAB, AHEAD = 8, 4
"""Queries per program of the second kernel, and partial results that it loads ahead."""

WARP_LANES, LEAST_WARPS = 32, 4
"""Values of a head per warp, and fewest warps: with fewer, heads of 256 spill."""


class SpanResults(NamedTuple):
    """Results of the spans for the second kernel, which reads only what the same launch wrote."""

    values: Tensor  # float32 [parts, KV heads, lanes, d] weighted sums, 0 where no row was visible
    weight: Tensor  # float32 [parts, KV heads, 2, lanes] largest score, and sum of weights


def span_results(items: CrossAttentionItems, q: Tensor, groups: int) -> SpanResults:
    """Allocates uninitialised memory for a launch; any launch of the same bucket may reuse it.

    Args:
        q: [tokens, heads, d].
        groups: KV heads.
    """
    (tokens, heads, d), lanes = q.shape, cross_attention_lanes(isinstance(items, SingleCrossAttention))
    each = max(lanes // (heads // groups), 1)
    parts = items.cross_token.shape[0] - -(-tokens // each)
    return SpanResults(
        torch.empty((parts, groups, lanes, d), dtype=torch.float32, device=q.device),
        torch.empty((parts, groups, 2, lanes), dtype=torch.float32, device=q.device),
    )


def cross_attend(
    q: Tensor, k: Tensor, v: Tensor, items: CrossAttentionItems, scale: float, out: Tensor, results: SpanResults
) -> None:
    """Computes cross-attention into ``out``; tokens that see no image get 0.

    Args:
        q: [tokens, heads, d], the last two dimensions contiguous.
        k, v: [arena rows, KV heads x d] of one layer: columns of one tensor.
        out: like q, contiguous.
        results: from ``span_results``.
    """
    tokens, heads, d = q.shape
    lanes, groups = results.values.shape[2], k.shape[1] // d
    attention_metadata.check_cross_attention(q, k, v, items, out)
    group = heads // groups
    tile = tile_sizes.pick("attend_pictures", q, group, "one" if lanes == DRAWN else "many")
    subs, slabs = lanes // tile.m, lanes // SLAB
    pictures_kernel[(groups * subs, items.cross_token.shape[0])](
        out, results.values, results.weight, q, k, v, items.unit_row, items.reach, items.times, items.cross_token,
        items.cross_unit, items.cross_last, items.cross_begin, items.cross_part, tokens, items.reach.shape[1],
        scale * online_softmax.LOG2E.value,
        GROUP=group, D=d, LANES=tile_sizes.lanes(d), M=tile.m, N=tile.n, BLOCK=lanes, SUBS=subs, SPAN=IMAGE_SPAN,
        Q_TOKEN=q.stride(0), ROW=k.stride(0), OUT_TOKEN=out.stride(0), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    pictures_join_kernel[(groups * slabs, items.merge_token.shape[0])](
        out, results.values, results.weight, items.merge_token, items.merge_part, tokens,
        GROUP=group, D=d, LANES=tile_sizes.lanes(d), BLOCK=lanes, SLAB=SLAB, SLABS=slabs, AHEAD=AHEAD,
        OUT_TOKEN=out.stride(0), num_warps=max(tile_sizes.lanes(d) // WARP_LANES, LEAST_WARPS),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "units"])
def pictures_kernel(
    out, part, weight, q, k, v, unit_row, reach, times, item_token, item_unit, item_last, item_begin, item_part,
    tokens, units, scale,
    GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    SUBS: tl.constexpr, SPAN: tl.constexpr, Q_TOKEN: tl.constexpr, ROW: tl.constexpr, OUT_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes M queries of one KV head, N rows of an image at a time (N divides SPAN)."""
    group = tl.program_id(0) // SUBS
    groups = tl.num_programs(0) // SUBS
    item = tl.program_id(1)
    token = tl.load(item_token + item)
    if token < 0:
        return
    lane = tl.program_id(0) % SUBS * M + tl.arange(0, M)
    dim = tl.arange(0, LANES)
    live = (lane < BLOCK // GROUP * GROUP) & (token + lane // GROUP < tokens)
    position = (token + lane // GROUP).to(tl.int64)
    column = (group * GROUP + lane % GROUP)[:, None] * D + dim[None, :]
    filled = live[:, None] & (dim < D)[None, :]
    queries = tl.load(q + position[:, None] * Q_TOKEN + column, mask=filled, other=0.0)
    first = tl.load(item_unit + item)
    begin = tl.load(item_begin + item)
    part_at = tl.load(item_part + item)
    acc = tl.zeros([M, LANES], tl.float32)
    peak = tl.full([M], online_softmax.LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    for unit in tl.range(first, tl.load(item_last + item), num_stages=1):
        last = tl.load(reach + position * units + unit, mask=live, other=0)
        often = tl.load(times + position * units + unit, mask=last > 0, other=1)
        at_row = (tl.load(unit_row + unit).to(tl.int64) + begin) * ROW + group * D
        far = tl.max(last, 0)
        near = tl.min(tl.where(live, last, far), 0)
        for span in tl.range(begin, tl.where(part_at < 0, far, begin + SPAN), SPAN, num_stages=1):
            more, high, size = _span(
                queries, k + at_row, v + at_row, tl.minimum(near - span, SPAN), tl.minimum(far - span, SPAN),
                last - span, scale, M, N, D, LANES, ROW,
            )  # fmt: skip
            high += tl.log2(tl.maximum(often, 1).to(tl.float32))
            acc, peak, total = online_softmax.join(acc, peak, total, more, high, size)
            at_row += SPAN * ROW
    if part_at < 0:
        mean = online_softmax.finish(acc, total).to(out.dtype.element_ty)
        tl.store(out + position[:, None] * OUT_TOKEN + column, mean, mask=filled)
    else:
        at = (part_at.to(tl.int64) * groups + group) * BLOCK
        tl.store(part + (at + lane)[:, None] * D + dim[None, :], acc, mask=filled)
        tl.store(weight + at * 2 + lane, peak, mask=live)
        tl.store(weight + at * 2 + BLOCK + lane, total, mask=live)


@triton.jit
def _span(
    queries, k, v, near, far, last, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Returns (acc, peak, total) over the rows up to ``far``; all queries see those up to ``near``, each those up to
    its ``last``.
    """
    whole = tl.maximum(near, 0) // N * N
    acc = tl.zeros([M, LANES], tl.float32)
    peak = tl.full([M], online_softmax.LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc, peak, total = _rows(acc, peak, total, queries, k, v, 0, whole, far, last, scale, False, N, D, LANES, ROW)
    return _rows(acc, peak, total, queries, k, v, whole, far, far, last, scale, True, N, D, LANES, ROW)


@triton.jit
def _rows(
    acc, peak, total, queries, k, v, start, stop, far, last, scale, MASKED: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Returns (acc, peak, total) after the tiles of N rows from ``start`` to ``stop``; rows from ``far`` on are not
    read.
    """
    dim = tl.arange(0, LANES)
    for key in tl.range(start, stop, N):
        row = key + tl.arange(0, N)
        stored = (dim < D)[None, :]
        keep = True
        if MASKED:
            stored = (row < far)[:, None] & stored
            keep = row[None, :] < last[:, None]
        at = row[:, None] * ROW + dim[None, :]
        keys = tl.load(k + at, mask=stored, other=0.0)
        values = tl.load(v + at, mask=stored, other=0.0)
        acc, peak, total = online_softmax.attend_tile(
            acc, peak, total, queries, tl.trans(keys), values, keep, scale, MASKED
        )
    return acc, peak, total


@triton.jit(do_not_specialize=["tokens"])
def pictures_join_kernel(
    out, part, weight, join_token, join_part, tokens,
    GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, SLAB: tl.constexpr,
    SLABS: tl.constexpr, AHEAD: tl.constexpr, OUT_TOKEN: tl.constexpr,
):  # fmt: skip
    """Joins the spans of SLAB queries of a block that was cut, one after the other, in the order of
    ``pictures_kernel``.

    AHEAD spans are loaded at a time.
    """
    group = tl.program_id(0) // SLABS
    groups = tl.num_programs(0) // SLABS
    join = tl.program_id(1)
    token = tl.load(join_token + join)
    if token < 0:
        return
    first = tl.load(join_part + join)
    left = tl.load(join_part + join + 1) - first
    lane = tl.program_id(0) % SLABS * SLAB + tl.arange(0, SLAB)
    dim = tl.arange(0, LANES)
    live = (lane < BLOCK // GROUP * GROUP) & (token + lane // GROUP < tokens)
    filled = (dim < D)[None, :]
    at = (first.to(tl.int64) * groups + group) * BLOCK + lane
    acc = tl.zeros([SLAB, LANES], tl.float32)
    peak = tl.full([SLAB], online_softmax.LOWEST, tl.float32)
    total = tl.zeros([SLAB], tl.float32)
    for _ in tl.range(0, left, AHEAD, num_stages=1):
        for _ in tl.static_range(AHEAD):
            used = live & (lane < tl.where(left > 0, BLOCK, 0))
            high = tl.load(weight + at * 2 - lane, mask=used, other=online_softmax.LOWEST)
            size = tl.load(weight + at * 2 - lane + BLOCK, mask=used, other=0.0)
            more = tl.load(part + at[:, None] * D + dim[None, :], mask=used[:, None] & filled, other=0.0)
            acc, peak, total = online_softmax.join(acc, peak, total, more, high, size)
            at += groups * BLOCK
            left -= 1
    position = (token + lane // GROUP).to(tl.int64)[:, None] * OUT_TOKEN
    column = (group * GROUP + lane % GROUP)[:, None] * D + dim[None, :]
    mean = online_softmax.finish(acc, total).to(out.dtype.element_ty)
    tl.store(out + position + column, mean, mask=live[:, None] & filled)
