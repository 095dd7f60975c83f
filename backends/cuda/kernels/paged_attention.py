"""Paged attention over work items, for rows of any number of tokens: prompts, decoding rows, and both in one launch.

An item packs the query heads of one KV head over some tokens of one row, so that grouped queries fill the tensor cores
and each key is read once for all of them; tiles of keys that every query sees are computed without a mask. Items are
data (launches/attention_work_items.py). Items of a block whose keys are cut leave partial results, which a second
kernel joins in the order of their keys. Grids: (KV heads times tiles of a block, items) and (KV heads times slabs,
joins), fixed by the bucket; unused programs end at once.

``--batch-invariant`` cuts at multiples of SPAN keys. An item of several spans attends to each by itself and joins them
as the second kernel would, so that a token has the same bits wherever its keys are cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import attention_metadata, online_softmax, quantised_kv_attention, tile_sizes
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn, SingleAttn
from trencadis.backends.cuda.kernels.layers import dependent_launch
from trencadis.backends.cuda.kernels.paged_attention_loop import KeyRanges, PagedKeys, attend_reach, start_run
from trencadis.backends.cuda.kernels.quantised_kv_attention import CodedKeys, attend_coded_reach, few_of
from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import MANY, SHORT, SINGLE, SPAN, lanes_of
from trencadis.core.device.backend import LayerKV

SLAB, PIECES, JOIN_WARPS = 8, 4, 4
"""Queries per program of the second kernel, pieces that it joins in one step, and its warps; when it joins one piece at
a time, each query has a warp: with fewer, heads of 80 spill on sm_100.
"""

PIECES_WIDE = 2
"""Pieces that it joins in one step of heads above 256, with a warp for each query: more do not fit the registers."""

PIECES_SINGLE = 32
"""Pieces that it joins in one step if a program has one query."""


PLAIN_BLOCK = 128
"""KV blocks of so many slots hold whole steps of keys, whose addresses the compiler computes otherwise."""


def length_classes(q: Tensor, kv: LayerKV, attn: ItemAttn, lanes: int, window: int) -> tuple[str, ...]:
    """Returns the classes of ``tile_sizes`` that a launch of prompts is of, with blocks of ``lanes`` queries.

    ``short`` and ``long`` are what they say; ``plain``: long, without a window or keys after a token's own position,
    over KV blocks of fewer than PLAIN_BLOCK slots. These leave registers for steps of 128 keys.
    """
    grouped = q.dtype.itemsize == 2 and tile_sizes.has_warp_group_products(tile_sizes.arch_of(q.device))
    if lanes <= SHORT or (q.shape[0] < MANY and not grouped):
        return ("short",)
    plain = not window and attn.upto is None and kv.k.shape[1] < PLAIN_BLOCK
    return ("plain", "long") if plain else ("long",)


class Partial(NamedTuple):
    """The results of the pieces for the second kernel, which reads only what the same launch wrote."""

    values: Tensor  # float32 [parts, KV heads, lanes, d] weighted sums
    weight: Tensor  # float32 [parts, KV heads, 2, lanes] largest score, and sum of weights


def block_lanes(attn: ItemAttn, tokens: int, alike: bool) -> int:
    """Returns query heads times tokens of a block of queries."""
    return SINGLE if isinstance(attn, SingleAttn) else lanes_of(tokens, alike)


def partial(attn: ItemAttn, q: Tensor, kv: LayerKV, alike: bool = False) -> Partial:
    """Allocates uninitialised memory for a launch of ``attn``; any launch of the same bucket may reuse it."""
    parts, groups = 2 * attn.join_row.shape[0], kv.k.shape[2]
    lanes = q.shape[1] // groups if isinstance(attn, SingleAttn) else block_lanes(attn, q.shape[0], alike)
    return Partial(
        torch.empty((parts, groups, lanes, q.shape[2]), dtype=torch.float32, device=q.device),
        torch.empty((parts, groups, 2, lanes), dtype=torch.float32, device=q.device),
    )


def attend_text(
    q: Tensor, kv: LayerKV, attn: ItemAttn, scale: float, out: Tensor, partial: Partial, alike: bool = False,
    window: int = 0, sinks: Tensor | None = None, planned: int = 0,
) -> None:  # fmt: skip
    """Computes attention into ``out``; surplus tokens get 0.

    Args:
        q: [tokens, heads, d], the last two dimensions contiguous.
        kv: contiguous, of q's dtype or of codes.
        out: like q, contiguous.
        alike: pick the same tile for every launch and cut at spans, so that a query's sums run in the same order in
            all of them.
        window: keys that a token sees, including its own; 0: all.
        sinks: float32 [heads], as for ``backend.Ops.attend``.
        planned: query heads per KV head by which ``attn`` was planned, if layers differ; 0: those of q.
    """
    attention_metadata.check_paged(q, kv, out)
    tokens, heads, d = q.shape
    groups = kv.k.shape[2]
    group, lanes, single = heads // groups, block_lanes(attn, tokens, alike), isinstance(attn, SingleAttn)
    kind = "attend_decode" if single else "attend_prefill"
    lengths = () if single else length_classes(q, kv, attn, lanes, window)
    tile = tile_sizes.pick(kind if kv.k_scale is None else f"{kind}_codes", q, group, *lengths)
    each = 1 if single else max(lanes // (planned or group), 1)
    lanes = min(lanes, tile_sizes.power(each * group)) if planned else lanes
    subs, rows = max(lanes // tile.m, 1), attn.context.shape[0]
    items_kernel[(groups * subs, attn.item_row.shape[0])](
        out, partial.values, partial.weight, q, kv.k, kv.v, attn.row_start, attn.context, attn.blocks,
        attn.block_start, attn.item_row, attn.item_token, attn.item_begin, attn.item_stop, attn.item_part,
        attn.context if attn.upto is None else attn.upto, rows, scale * online_softmax.LOG2E.value,
        partial.weight if sinks is None else sinks, *quantised_kv_attention.pointers(kv),
        GROUP=group, D=d, LANES=tile_sizes.lanes(d), M=tile.m, N=tile.n, BLOCK=kv.k.shape[1], TOKENS=each, SUBS=subs,
        PART=partial.weight.shape[3], Q_TOKEN=q.stride(0), KV_TOKEN=kv.k.stride(1), OUT_TOKEN=out.stride(0),
        WINDOW=window, UPTO=attn.upto is not None, ONE=single, SPAN=SPAN if alike else 0, SINKS=sinks is not None,
        **quantised_kv_attention.constants(kv),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    join(partial, attn, q, kv, out, alike, sinks=sinks, planned=planned)


def join(
    partial: Partial, attn: ItemAttn, q: Tensor, kv: LayerKV, out: Tensor, alike: bool, depends: bool = False,
    sinks: Tensor | None = None, planned: int = 0, gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Joins the partial results of each block that was cut into ``out``; ``depends``: by a dependent launch.

    Args:
        gate: [tokens, heads, d], a view with contiguous heads: its sigmoid multiplies the results; None: nothing does.
    """
    tokens, heads, d = q.shape
    groups, single = kv.k.shape[2], isinstance(attn, SingleAttn)
    group = heads // groups
    each = 1 if single else max(block_lanes(attn, tokens, alike) // (planned or group), 1)
    slab = 1 if single else SLAB
    slabs = -(-each * group // slab)
    wide = d > 256 and not single
    join_kernel[(groups * slabs, attn.join_row.shape[0])](
        out, partial.values, partial.weight, attn.row_start, attn.join_row, attn.join_token, attn.join_part,
        partial.weight if sinks is None else sinks, out if gate is None else gate,
        GROUP=group, D=d, LANES=tile_sizes.lanes(d), TOKENS=each, PART=partial.weight.shape[3], SLAB=slab, SLABS=slabs,
        PIECES=1 if alike else PIECES_SINGLE if single else PIECES_WIDE if wide else PIECES,
        OUT_TOKEN=out.stride(0), DEPENDENT=depends, SINKS=sinks is not None,
        GATE_TOKEN=0 if gate is None else gate.stride(0),
        num_warps=SLAB if alike or wide else JOIN_WARPS, **dependent_launch.options(depends),
    )  # fmt: skip


class QueryTile(NamedTuple):
    """A tile of a block of queries."""

    queries: tl.tensor  # [M, LANES]
    lane: tl.tensor  # int32 [M]: index in the block: token times heads plus head
    live: tl.tensor  # bool [M]
    position: tl.tensor  # int64 [M]: index of the token in the launch
    token: tl.tensor  # int32 [M]: index of the token in its row
    head: tl.tensor  # int32 [M]
    top: tl.tensor  # int32: the first token of the tile, and the end of its tokens (exclusive)
    below: tl.tensor


@triton.jit(do_not_specialize=["rows"])
def items_kernel(
    out, part, weight, q, k, v, row_start, context, blocks, block_start,
    item_row, item_token, item_begin, item_stop, item_part, upto, rows, scale, sinks, k_scale, v_scale, kept, pairs,
    GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, SUBS: tl.constexpr, PART: tl.constexpr, Q_TOKEN: tl.constexpr, KV_TOKEN: tl.constexpr,
    OUT_TOKEN: tl.constexpr, WINDOW: tl.constexpr, UPTO: tl.constexpr, ONE: tl.constexpr, SPAN: tl.constexpr,
    SINKS: tl.constexpr, FORM: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Computes one tile of an item. ``rows`` includes the surplus row, which is the last and has no keys."""
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
    tile = _queries(q, start, token, count, group, sub, GROUP, D, LANES, M, TOKENS, Q_TOKEN, ONE)
    before = tl.load(context + row)
    begin = tl.load(item_begin + item)
    limit = tl.where(row < rows - 1, tl.load(item_stop + item), 0)
    reach = _reach(tile, upto, before, begin, limit, N, WINDOW, UPTO, ONE)
    part_at = tl.load(item_part + item)
    few = 0
    if FORM > 0:
        few = few_of(q + tile.position * Q_TOKEN + tile.head * D, pairs, group, tile.live, KEPT)
    code_params = CodedKeys(k_scale + group, v_scale + group, kept + group * KEPT, few)
    keys = PagedKeys(k + group * D, v + group * D, blocks + tl.load(block_start + row), reach.stop)
    beyond = (part_at.to(tl.int64) * (KV_TOKEN // D) + group) * PART
    if SPAN == 0:
        run = attend_part(
            reach, keys, tile.queries, code_params, scale, M, N, BLOCK, KV_TOKEN, D, LANES, WINDOW, ONE, FORM, KEPT
        )
        acc, peak, total = run.acc, run.peak, run.total
        if part_at >= 0:
            leave_part(part, weight, beyond, tile, acc, peak, total, PART, D, LANES)
    else:
        acc, peak, total = _empty(M, LANES)
        for span in tl.range(begin, tl.where(part_at >= 0, limit, reach.stop), SPAN, num_stages=1):
            inner, own = _within(reach, keys, span, SPAN)
            run = attend_part(
                inner, own, tile.queries, code_params, scale, M, N, BLOCK, KV_TOKEN, D, LANES, WINDOW, ONE, FORM, KEPT
            )
            if part_at >= 0:
                leave_part(part, weight, beyond, tile, run.acc, run.peak, run.total, PART, D, LANES)
                beyond += (KV_TOKEN // D) * PART
            else:
                acc, peak, total = online_softmax.join(acc, peak, total, run.acc, run.peak, run.total)
    if part_at < 0:
        dim = tl.arange(0, LANES)
        at = tile.position[:, None] * OUT_TOKEN + (tile.head * D)[:, None] + dim[None, :]
        if SINKS:
            sink = tl.load(sinks + tile.head, mask=tile.live, other=0.0)
            total = online_softmax.add_sink(total, peak, sink)
        mean = online_softmax.finish(acc, total).to(out.dtype.element_ty)
        tl.store(out + at, mean, mask=tile.live[:, None] & (dim < D)[None, :])


@triton.jit
def _queries(
    q, start, token, count, group, sub, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr,
    TOKENS: tl.constexpr, Q_TOKEN: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Returns the ``QueryTile`` from lane ``sub`` of the block that begins with ``token``; ONE: rows have one token
    each.
    """
    lane = sub + tl.arange(0, M)
    if ONE:
        live = lane < GROUP
        own = lane * 0 + token
        below = token + 1
        head = group * GROUP + lane
    else:
        live = (lane // GROUP < TOKENS) & (token + lane // GROUP < count)
        own = token + lane // GROUP
        below = tl.minimum(token + tl.minimum((sub + M - 1) // GROUP + 1, TOKENS), count)
        head = group * GROUP + lane % GROUP
    dim = tl.arange(0, LANES)
    position = (start + own).to(tl.int64)
    at = position[:, None] * Q_TOKEN + (head * D)[:, None] + dim[None, :]
    values = tl.load(q + at, mask=live[:, None] & (dim < D)[None, :], other=0.0)
    return QueryTile(values, lane, live, position, own, head, token + sub // GROUP, below)


@triton.jit
def _reach(
    tile, upto, before, begin, limit, N: tl.constexpr, WINDOW: tl.constexpr, UPTO: tl.constexpr, ONE: tl.constexpr
):
    """Returns the ``KeyRanges`` of a tile of queries among the keys from ``begin`` to ``limit``, after ``before``
    stored ones.
    """
    stop = tl.minimum(before + tile.below, limit)
    whole = tl.minimum(before + tile.top + 1, limit)
    last = before + tile.top if ONE else (before + tile.token)[:, None]
    first = 0
    edge = begin
    if WINDOW > 0:
        first = last - WINDOW + 1
        begin = tl.maximum(begin, (before + tile.top - WINDOW + 1) // N * N)
        edge = tl.maximum(begin, (tl.maximum(before + tile.below - WINDOW, 0) + N - 1) // N * N)
    if UPTO:
        ends = tl.load(upto + tile.position, mask=tile.live, other=-1)
        last = ends[:, None]
        stop = tl.minimum(tl.max(ends, 0) + 1, limit)
        whole = tl.minimum(tl.min(tl.where(tile.live, ends, stop), 0) + 1, limit)
    return KeyRanges(begin, edge, whole, stop, first, last)


@triton.jit
def _within(reach, keys, span, SPAN: tl.constexpr):
    """Returns (``reach``, ``keys``) limited to the SPAN keys from ``span`` on."""
    begin, edge, whole, stop, first, last = reach
    end = tl.minimum(span + SPAN, stop)
    inner = KeyRanges(tl.maximum(begin, span), tl.maximum(edge, span), tl.minimum(whole, end), end, first, last)
    return inner, PagedKeys(keys.k, keys.v, keys.table, end)


@triton.jit
def _empty(M: tl.constexpr, LANES: tl.constexpr):
    """Returns (acc, peak, total) of no keys."""
    return tl.zeros([M, LANES], tl.float32), tl.full([M], online_softmax.LOWEST, tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def attend_part(
    reach, keys, queries, code_params, scale, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, ONE: tl.constexpr, FORM: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Returns ``RunningAttention`` over the keys of ``reach``; its ``edge`` and ``whole`` may lie outside."""
    begin, edge, whole, stop, first, last = reach
    if WINDOW > 0:
        edge = tl.maximum(tl.minimum(edge, (stop + N - 1) // N * N), begin)
    whole = tl.maximum(begin + (whole - begin) // N * N, edge)
    run = start_run(keys, begin, M, LANES, N, BLOCK)
    reach = KeyRanges(begin, edge, whole, stop, first, last)
    if FORM == 0:
        run = attend_reach(run, queries, keys, reach, scale, ONE, WINDOW, N, BLOCK, KV_TOKEN, D, LANES)
    else:
        G: tl.constexpr = KV_TOKEN // D
        run = attend_coded_reach(
            run, queries, keys, code_params, reach, scale, ONE, WINDOW, N, BLOCK, G, D, LANES, FORM, KEPT
        )
    return run


@triton.jit
def leave_part(part, weight, at, tile, acc, peak, total, PART: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr):
    """Stores a partial result, from lane ``at`` of the tensors on; the values of a query without visible keys are never
    read.
    """
    dim = tl.arange(0, LANES)
    seen = tile.live & (total > 0)
    lane = tile.lane
    tl.store(part + (at + lane)[:, None] * D + dim[None, :], acc, mask=seen[:, None] & (dim < D)[None, :])
    tl.store(weight + at * 2 + lane, peak, mask=tile.live)
    tl.store(weight + at * 2 + PART + lane, total, mask=tile.live)


@triton.jit
def join_kernel(
    out, part, weight, row_start, join_row, join_token, join_part, sinks, gate,
    GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr,
    SLAB: tl.constexpr, SLABS: tl.constexpr, PIECES: tl.constexpr, OUT_TOKEN: tl.constexpr, DEPENDENT: tl.constexpr,
    SINKS: tl.constexpr, GATE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Joins SLAB queries of a block that was cut, PIECES partial results at a time; if 1, in the order of
    ``items_kernel``. GATE_TOKEN is the stride of the gates' tokens, whose heads lie 2 x D apart; 0: there are none.
    """
    if DEPENDENT:
        dependent_launch.wait()
    group = tl.program_id(0) // SLABS
    groups = tl.num_programs(0) // SLABS
    join = tl.program_id(1)
    row = tl.load(join_row + join)
    if row < 0:
        return
    first = tl.load(join_part + join)
    stop = tl.load(join_part + join + 1)
    start = tl.load(row_start + row)
    token = tl.load(join_token + join)
    lane = tl.program_id(0) % SLABS * SLAB + tl.arange(0, SLAB)
    ahead = lane // GROUP
    live = (ahead < TOKENS) & (start + token + ahead < tl.load(row_start + row + 1))
    dim = tl.arange(0, LANES)
    acc, peak, total = _empty(SLAB, LANES)
    for begin in range(first, stop, PIECES):
        piece = begin + tl.arange(0, PIECES)
        used = (piece < stop)[:, None] & live[None, :]
        at = (piece.to(tl.int64)[:, None] * groups + group) * PART
        high = tl.load(weight + at * 2 + lane[None, :], mask=used, other=online_softmax.LOWEST)
        size = tl.load(weight + at * 2 + PART + lane[None, :], mask=used, other=0.0)
        where = (at + lane[None, :])[:, :, None] * D + dim[None, None, :]
        values = tl.load(part + where, mask=(size > 0)[:, :, None] & (dim < D)[None, None, :], other=0.0)
        if PIECES == 1:
            acc, peak, total = online_softmax.join(
                acc, peak, total, tl.sum(values, 0), tl.sum(high, 0), tl.sum(size, 0)
            )  # fmt: skip
        else:
            best = tl.maximum(peak, tl.max(high, 0))
            share = tl.exp2(high - best[None, :])
            fade = tl.exp2(peak - best)
            acc = acc * fade[:, None] + tl.sum(values * share[:, :, None], 0)
            total = total * fade + tl.sum(size * share, 0)
            peak = best
    if SINKS:
        sink = tl.load(sinks + group * GROUP + lane % GROUP, mask=live, other=0.0)
        total = online_softmax.add_sink(total, peak, sink)
    position = (start + token + ahead).to(tl.int64)[:, None]
    head = (group * GROUP + lane % GROUP)[:, None]
    there = live[:, None] & (dim < D)[None, :]
    mean = online_softmax.finish(acc, total).to(out.dtype.element_ty)
    if GATE_TOKEN > 0:
        mean = online_softmax.gate_mean(mean, gate + position * GATE_TOKEN + head * (2 * D) + dim[None, :], there)
    tl.store(out + position * OUT_TOKEN + head * D + dim[None, :], mean, mask=there)
