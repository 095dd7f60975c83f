"""Paged attention over rows of any number of tokens, causal over what is stored: prefill, and mixed batches.

A Q-block packs the query heads of one KV head over several tokens (M // GROUP of them) into one tile, so that grouped
queries fill the tensor cores and each key is read once for all of them. Tiles that every query sees are computed
without a mask. Grid: (KV heads, Q-blocks), fixed by the bucket; Q-blocks beyond those in use end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import checks, softmax, tiles
from trencadis.backends.cuda.kernels.attn import PrefillAttn
from trencadis.backends.cuda.kernels.coded import kv_codes
from trencadis.backends.cuda.kernels.coded.kv_codes import CodedKeys, attend_coded_reach, few_of
from trencadis.backends.cuda.kernels.paging import PagedKeys, Reach, attend_reach, start_run
from trencadis.core.backend import LayerKV

SHORT = 512
"""Launches of fewer tokens take smaller Q-blocks, which keep more processors busy."""


def attend_prefill(
    q: Tensor, kv: LayerKV, attn: PrefillAttn, scale: float, out: Tensor, alike: bool = False, window: int = 0
) -> None:
    """Attends; surplus tokens get 0.

    Args:
        q: [tokens, heads, d], the last two dimensions contiguous.
        kv: contiguous, of q's dtype or of codes.
        out: like q, contiguous.
        window: keys that a token sees, itself included; 0: all.
        alike: pick the same tile for every launch, so that a query's sums run in the same order in all of them.
    """
    checks.paged(q, kv, out)
    k, v = kv.k, kv.v
    tokens, heads, d = q.shape
    groups = k.shape[2]
    kernel = "attend_prefill" if kv.k_scale is None else "attend_prefill_codes"
    tile = tiles.pick(kernel, q, heads // groups, "short" if alike or tokens < SHORT else "long")
    rows = attn.work_row.shape[0]
    grid = (groups, tokens // (tile.m // (heads // groups)) + rows)
    prefill_kernel[grid](
        out, q, k, v, attn.row_start, attn.context, attn.blocks, attn.block_start, attn.work_row, attn.work_start,
        attn.context if attn.upto is None else attn.upto, rows, scale * softmax.LOG2E.value, *kv_codes.pointers(kv),
        GROUP=heads // groups, D=d, LANES=tiles.lanes(d), M=tile.m, N=tile.n, BLOCK=k.shape[1],
        Q_TOKEN=q.stride(0), KV_TOKEN=k.stride(1), OUT_TOKEN=out.stride(0), ROWS=tiles.power(rows),
        WINDOW=window, UPTO=attn.upto is not None, **kv_codes.constants(kv),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def prefill_kernel(
    out, q, k, v, row_start, context, blocks, block_start, work_row, work_start, upto, rows, scale,
    k_scale, v_scale, kept, pairs,
    GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    Q_TOKEN: tl.constexpr, KV_TOKEN: tl.constexpr, OUT_TOKEN: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, UPTO: tl.constexpr, FORM: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """``rows`` counts the surplus row, which is the last and has no keys."""
    TOKENS: tl.constexpr = M // GROUP
    group = tl.program_id(0)
    index = tl.program_id(1)
    # Work item i owns the indices from work_start[i] // TOKENS + i: never fewer than its Q-blocks.
    item = tl.arange(0, ROWS)
    begins = tl.load(work_start + item, mask=item < rows, other=1 << 30) // TOKENS + item
    place = tl.sum((begins <= index).to(tl.int32), 0) - 1
    row = tl.load(work_row + place)
    begin = tl.load(work_start + place) // TOKENS + place
    start = tl.load(row_start + row)
    count = tl.load(row_start + row + 1) - start
    piece = (count + TOKENS - 1) // TOKENS - 1 - (index - begin)  # the last ones see most keys: first
    if piece < 0:
        return
    lane = tl.arange(0, M)
    token = piece * TOKENS + lane // GROUP
    live = (lane // GROUP < TOKENS) & (token < count)
    dim = tl.arange(0, LANES)
    inside = live[:, None] & (dim < D)[None, :]
    at = (start + token)[:, None] * Q_TOKEN + ((group * GROUP + lane % GROUP) * D)[:, None] + dim[None, :]
    queries = tl.load(q + at, mask=inside, other=0.0)

    before = tl.load(context + row)
    real = row < rows - 1
    stop = tl.where(real, before + tl.minimum((piece + 1) * TOKENS, count), 0)
    whole = tl.where(real, (before + piece * TOKENS + 1) // N * N, 0)
    last = (before + token)[:, None]
    first = 0
    begin_key = 0
    edge = 0  # every query sees the keys from here to ``whole``
    if WINDOW > 0:
        first = last - WINDOW + 1
        oldest = before + piece * TOKENS - WINDOW + 1
        newest = before + tl.minimum((piece + 1) * TOKENS, count) - WINDOW
        begin_key = tl.where(real, tl.maximum(oldest, 0) // N * N, 0)
        edge = tl.where(real, (tl.maximum(newest, 0) + N - 1) // N * N, 0)
    if UPTO:
        ends = tl.load(upto + start + token, mask=live, other=-1)
        last = ends[:, None]
        stop = tl.where(real, tl.max(ends, 0) + 1, 0)
        whole = tl.where(real, (tl.min(tl.where(live, ends, stop), 0) + 1) // N * N, 0)
    if WINDOW > 0:
        whole = tl.maximum(whole, edge)
    keys = PagedKeys(k + group * D, v + group * D, blocks + tl.load(block_start + row), stop)
    run = start_run(keys, begin_key, M, LANES, N, BLOCK)
    reach = Reach(begin_key, edge, whole, stop, first, last)
    if FORM == 0:
        run = attend_reach(run, queries, keys, reach, scale, False, WINDOW, N, BLOCK, KV_TOKEN, D, LANES)
    else:
        G: tl.constexpr = KV_TOKEN // D
        few = few_of(q + (start + token) * Q_TOKEN + (group * GROUP + lane % GROUP) * D, pairs, group, live, KEPT)
        beside = CodedKeys(k_scale + group, v_scale + group, kept + group * KEPT, few)
        run = attend_coded_reach(
            run, queries, keys, beside, reach, scale, False, WINDOW, N, BLOCK, G, D, LANES, FORM, KEPT
        )
    at = (start + token)[:, None] * OUT_TOKEN + ((group * GROUP + lane % GROUP) * D)[:, None] + dim[None, :]
    tl.store(out + at, softmax.finish(run.acc, run.total).to(out.dtype.element_ty), mask=inside)
