"""Paged attention of one token per row: split-KV cuts the keys of a row into pieces, attends to them in parallel and
combines the results.

How rows are cut is data (``splits.cut``), so one kernel serves any batch, and ``--batch-invariant`` as well. A row of
one piece is written at once; the second kernel combines the others, tile by tile, and writes 0 for padding rows.
Grids: (KV heads, pieces) and (heads, rows), fixed by the bucket; unused pieces end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import checks, softmax, tiles
from trencadis.backends.cuda.kernels.attn import SplitDecodeAttn
from trencadis.backends.cuda.kernels.coded import kv_codes
from trencadis.backends.cuda.kernels.coded.kv_codes import CodedKeys, attend_coded_reach, few_of
from trencadis.backends.cuda.kernels.paging import PagedKeys, Reach, attend_reach, start_run
from trencadis.core.backend import LayerKV


class Partial(NamedTuple):
    """The results of the pieces for the second kernel, which reads only what the same launch wrote."""

    values: Tensor  # float32 [pieces, heads, d] weighted means
    weight: Tensor  # float32 [pieces, heads] log2 of the sum of weights


def partial(attn: SplitDecodeAttn, heads: int, d: int) -> Partial:
    """Unwritten memory for a launch of ``attn``; any launch of the same bucket may reuse it."""
    pieces, device = attn.split_row.shape[0], attn.split_row.device
    return Partial(
        torch.empty((pieces, heads, d), dtype=torch.float32, device=device),
        torch.empty((pieces, heads), dtype=torch.float32, device=device),
    )


def attend_decode(
    q: Tensor, kv: LayerKV, attn: SplitDecodeAttn, scale: float, out: Tensor, partial: Partial, window: int = 0
) -> None:
    """Attends; padding rows get 0. Pieces that lie before the ``window`` (0: none) end at once.

    Args:
        q: [rows, heads, d], the last two dimensions contiguous.
        kv: contiguous, of q's dtype or of codes.
        out: like q, contiguous.
    """
    checks.paged(q, kv, out)
    k, v = kv.k, kv.v
    rows, heads, d = q.shape
    groups = k.shape[2]
    tile = tiles.pick("attend_decode" if kv.k_scale is None else "attend_decode_codes", q, heads // groups)
    decode_kernel[(groups, attn.split_row.shape[0])](
        out, partial.values, partial.weight, q, k, v, attn.context, attn.blocks, attn.block_start,
        attn.row_split, attn.split_row, attn.split_start, attn.split_stop, scale * softmax.LOG2E.value,
        *kv_codes.pointers(kv),
        GROUP=heads // groups, D=d, LANES=tiles.lanes(d), M=tile.m, N=tile.n, BLOCK=k.shape[1],
        Q_TOKEN=q.stride(0), KV_TOKEN=k.stride(1), HEADS=heads, WINDOW=window, **kv_codes.constants(kv),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    combine_kernel[(heads, rows)](
        out, partial.values, partial.weight, attn.row_split,
        D=d, LANES=tiles.lanes(d), HEADS=heads, PIECES=COMBINE_PIECES, WINDOWED=window > 0, num_warps=COMBINE_WARPS,
    )  # fmt: skip


COMBINE_PIECES, COMBINE_WARPS = 32, 4
"""Pieces that one step combines, and the warps that do it."""


@triton.jit
def decode_kernel(
    out, part, weight, q, k, v, context, blocks, block_start, row_split, split_row, split_start, split_stop, scale,
    k_scale, v_scale, kept, pairs,
    GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    Q_TOKEN: tl.constexpr, KV_TOKEN: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr, FORM: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    piece = tl.program_id(1)
    start = tl.load(split_start + piece)
    stop = tl.load(split_stop + piece)
    if stop <= start:
        return
    row = tl.load(split_row + piece)
    lane = tl.arange(0, M)
    head = group * GROUP + lane
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.load(context + row) + 1 - WINDOW, 0)
        if stop <= first:
            tl.store(weight + piece * HEADS + head, tl.full([M], float("-inf"), tl.float32), mask=lane < GROUP)
            return
        start = tl.maximum(start, first // N * N)
    dim = tl.arange(0, LANES)
    inside = (lane < GROUP)[:, None] & (dim < D)[None, :]
    queries = tl.load(q + row * Q_TOKEN + head[:, None] * D + dim[None, :], mask=inside, other=0.0)

    keys = PagedKeys(k + group * D, v + group * D, blocks + tl.load(block_start + row), stop)
    whole = start + (stop - start) // N * N
    run = start_run(keys, start, M, LANES, N, BLOCK)
    edge = start  # before it lies the tile that the window cuts
    if WINDOW > 0:
        edge = tl.where(first > start, start + N, start)
        whole = tl.maximum(whole, edge)
    last = stop - 1
    reach = Reach(start, edge, whole, stop, first, last)
    if FORM == 0:
        run = attend_reach(run, queries, keys, reach, scale, True, WINDOW, N, BLOCK, KV_TOKEN, D, LANES)
    else:
        G: tl.constexpr = HEADS // GROUP
        few = few_of(q + row * Q_TOKEN + head * D, pairs, group, lane < GROUP, KEPT)
        beside = CodedKeys(k_scale + group, v_scale + group, kept + group * KEPT, few)
        run = attend_coded_reach(
            run, queries, keys, beside, reach, scale, True, WINDOW, N, BLOCK, G, D, LANES, FORM, KEPT
        )

    mean = softmax.finish(run.acc, run.total)
    if tl.load(row_split + row + 1) - tl.load(row_split + row) == 1:
        at = (row * HEADS + head)[:, None] * D + dim[None, :]
        tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)
    else:
        at = (piece * HEADS + head)[:, None] * D + dim[None, :]
        tl.store(part + at, mean, mask=inside)
        tl.store(weight + piece * HEADS + head, run.peak + tl.log2(run.total), mask=lane < GROUP)


@triton.jit
def combine_kernel(
    out, part, weight, row_split,
    D: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    first = tl.load(row_split + row)
    stop = tl.load(row_split + row + 1)
    if stop - first == 1:
        return
    dim = tl.arange(0, LANES)
    acc = tl.zeros([LANES], tl.float32)
    peak = softmax.LOWEST
    total = 0.0
    for begin in range(first, stop, PIECES):
        piece = begin + tl.arange(0, PIECES)
        used = piece < stop
        size = tl.load(weight + piece * HEADS + head, mask=used, other=float("-inf"))
        if WINDOWED:
            used = used & (size > float("-inf"))  # a piece before the window left no values
        at = (piece * HEADS + head)[:, None] * D + dim[None, :]
        values = tl.load(part + at, mask=used[:, None] & (dim < D)[None, :], other=0.0)
        best = tl.maximum(peak, tl.max(size, 0))
        share = tl.exp2(size - best)
        fade = tl.exp2(peak - best)
        total = total * fade + tl.sum(share, 0)
        acc = acc * fade + tl.sum(values * share[:, None], 0)
        peak = best
    mean = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * HEADS + head) * D + dim, mean.to(out.dtype.element_ty), mask=dim < D)
