"""Attention of the vision tower over packed slots: inside windows of 64 slots, and over whole images.

The first ``real`` slots of a window are patches, the others padding that no query may see; there is padding inside
images as well as after them. No mask of [slots, slots] is made: an image is a range of windows, and a key counts if its
index in its window is below the window's ``real``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trencadis.backends.cuda.kernels import attention_metadata, online_softmax, tile_sizes
from trencadis.backends.cuda.kernels.attention_metadata import CudaSegments
from trencadis.core.vision_config import WINDOW_SLOTS

WINDOW = WINDOW_SLOTS


def attend_windows(q: Tensor, k: Tensor, v: Tensor, seg: CudaSegments, scale: float, out: Tensor) -> None:
    """Computes attention of each slot over the real slots of its window.

    Args:
        q, k, v: [slots, heads, d], the last two dimensions contiguous.
        out: like q, contiguous.
    """
    attention_metadata.check_packed(q, k, v, out)
    slots, heads, d = q.shape
    tile = tile_sizes.pick("attend_windows", q, 1)
    lanes, tail = halves(d)
    windows_kernel[(heads, slots // tile.m)](
        out, q, k, v, seg.real, scale * online_softmax.LOG2E.value,
        D=d, LANES=lanes, TAIL=tail, M=tile.m, N=WINDOW, Q_TOKEN=q.stride(0), K_TOKEN=k.stride(0), V_TOKEN=v.stride(0),
        OUT_TOKEN=out.stride(0), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def attend_images(
    q: Tensor, k: Tensor, v: Tensor, seg: CudaSegments, scale: float, out: Tensor, alike: bool = False
) -> None:
    """Computes attention of each slot over the real slots of its image.

    Args:
        q, k, v: [slots, heads, d], the last two dimensions contiguous.
        out: like q, contiguous.
        alike: pick the same tile for every launch, so that a query's sums run in the same order in all of them.
    """
    attention_metadata.check_packed(q, k, v, out)
    slots, heads, d = q.shape
    tile = tile_sizes.pick("attend_images", q, 1, "short" if alike or slots < SHORT else "long")
    lanes, tail = halves(d)
    images_kernel[(triton.cdiv(slots, tile.m), heads)](
        out, q, k, v, seg.segment, seg.real, seg.first, seg.stop, seg.whole, seg.order, slots,
        scale * online_softmax.LOG2E.value,
        D=d, LANES=lanes, TAIL=tail, M=tile.m, N=tile.n, WINDOW=WINDOW,
        Q_TOKEN=q.stride(0), K_TOKEN=k.stride(0), V_TOKEN=v.stride(0), OUT_TOKEN=out.stride(0),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def halves(d: int) -> tuple[int, int]:
    """Returns the lanes of the two parts in which a head of ``d`` values is multiplied, powers of two; (lanes, 0) for
    one part.

    A head of 80 in two parts has 64 and 16 lanes, where one part would have 128; a head of 72 fills half of its second.
    """
    whole = tile_sizes.power(d) // 2
    tail = tile_sizes.lanes(d - whole)
    return (whole, tail) if tail < whole else (tile_sizes.lanes(d), 0)


SHORT = 1024
"""Launches of fewer slots take smaller tiles of queries, which keep more processors busy."""


@triton.jit
def windows_kernel(
    out, q, k, v, real, scale, D: tl.constexpr, LANES: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, OUT_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes M queries of one head (M divides a window) over all N keys of their window, in a single tile."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    window = tile * M // N
    lane = tl.arange(0, N)
    dim = tl.arange(0, LANES)
    query = (tile * M + tl.arange(0, M)).to(tl.int64)[:, None]
    key = (window * N + lane).to(tl.int64)[:, None]
    column = (head * D + dim)[None, :]
    filled = (dim < D)[None, :]
    keep = lane < tl.load(real + window)
    queries = tl.load(q + query * Q_TOKEN + column, mask=filled, other=0.0)
    keys = tl.load(k + key * K_TOKEN + column, mask=keep[:, None] & filled, other=0.0)
    values = tl.load(v + key * V_TOKEN + column, mask=keep[:, None] & filled, other=0.0)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if TAIL:
        behind = (head * D + LANES + tl.arange(0, TAIL))[None, :]
        # A constant if every lane is filled, so that the masks of such heads need no comparison.
        inside = tl.full([1, TAIL], 1, tl.int1) if LANES + TAIL == D else (LANES + tl.arange(0, TAIL) < D)[None, :]
        queries_behind = tl.load(q + query * Q_TOKEN + behind, mask=inside, other=0.0)
        keys_behind = tl.load(k + key * K_TOKEN + behind, mask=keep[:, None] & inside, other=0.0)
        scores = tl.dot(queries_behind, tl.trans(keys_behind), scores, input_precision="ieee")
    peak = tl.full([M], online_softmax.LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    weights, _, _, total = online_softmax.tile_weights(peak, total, scores, keep[None, :], scale, True)
    shares = weights.to(values.dtype)
    to = out + query * OUT_TOKEN
    mean = online_softmax.finish(tl.dot(shares, values, input_precision="ieee"), total)
    tl.store(to + column, mean.to(out.dtype.element_ty), mask=filled)
    if TAIL:
        values_behind = tl.load(v + key * V_TOKEN + behind, mask=keep[:, None] & inside, other=0.0)
        mean = online_softmax.finish(tl.dot(shares, values_behind, input_precision="ieee"), total)
        tl.store(to + behind, mean.to(out.dtype.element_ty), mask=inside)


class ImageRun(NamedTuple):
    """The running sums of attention over an image's keys, and the window of the next tile."""

    acc: tl.tensor  # float32 [M, LANES]
    behind: tl.tensor  # float32 [M, TAIL]; never read if TAIL is 0
    peak: tl.tensor  # float32 [M]
    total: tl.tensor  # float32 [M]
    window: tl.tensor  # int32


class PackedKeys(NamedTuple):
    """One head of a launch's keys."""

    k: tl.tensor  # pointer to the head's first value
    v: tl.tensor
    order: tl.tensor  # pointers to the fields of ``CudaSegments``
    segment: tl.tensor
    real: tl.tensor
    count: tl.tensor  # int32: windows of the launch


@triton.jit(do_not_specialize=["slots"])
def images_kernel(
    out, q, k, v, segment, real, first, last, whole, order, slots, scale,
    D: tl.constexpr, LANES: tl.constexpr, TAIL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, OUT_TOKEN: tl.constexpr,
):  # fmt: skip
    """Computes M queries of one head, which may belong to several images, over N keys at a time (N divides a window).

    If all queries belong to one image, its windows without padding come first and need no mask. TAIL: lanes of a second
    part of each head (``halves``), 0 for none; those at its end may be empty.
    """
    REST: tl.constexpr = TAIL if TAIL else 16
    tile = tl.program_id(0)
    head = tl.program_id(1)
    slot = tile * M + tl.arange(0, M)
    live = slot < slots
    dim = tl.arange(0, LANES)
    column = (head * D + dim)[None, :]
    filled = (dim < D)[None, :]
    wide = slot.to(tl.int64)[:, None]
    queries = tl.load(q + wide * Q_TOKEN + column, mask=live[:, None] & filled, other=0.0)
    behind = (head * D + LANES + tl.arange(0, REST))[None, :]
    inside = tl.full([1, REST], 1, tl.int1) if LANES + REST == D else (LANES + tl.arange(0, REST) < D)[None, :]
    queries_behind = queries
    if TAIL:
        queries_behind = tl.load(q + wide * Q_TOKEN + behind, mask=live[:, None] & inside, other=0.0)
    image = tl.load(segment + slot // WINDOW, mask=live, other=-1)
    own = tile * M // WINDOW
    begin = tl.load(first + own)
    end = tl.load(last + (tl.minimum(tile * M + M, slots) - 1) // WINDOW)
    masked = tl.where(end == tl.load(last + own), tl.load(whole + own), begin)
    keys = PackedKeys(k + head * D, v + head * D, order, segment, real, slots // WINDOW)
    run = ImageRun(
        tl.zeros([M, LANES], tl.float32), tl.zeros([M, REST], tl.float32),
        tl.full([M], online_softmax.LOWEST, tl.float32),
        tl.zeros([M], tl.float32), tl.load(order + begin),
    )  # fmt: skip
    run = attend_packed(
        run, queries, queries_behind, keys, begin * WINDOW, masked * WINDOW, image, scale, False, D, LANES, TAIL, N,
        WINDOW, K_TOKEN, V_TOKEN,
    )  # fmt: skip
    run = attend_packed(
        run, queries, queries_behind, keys, masked * WINDOW, end * WINDOW, image, scale, True, D, LANES, TAIL, N,
        WINDOW, K_TOKEN, V_TOKEN,
    )  # fmt: skip
    to = out + wide * OUT_TOKEN
    mean = online_softmax.finish(run.acc, run.total).to(out.dtype.element_ty)
    tl.store(to + column, mean, mask=live[:, None] & filled)
    if TAIL:
        mean = online_softmax.finish(run.behind, run.total).to(out.dtype.element_ty)
        tl.store(to + behind, mean, mask=live[:, None] & inside)


@triton.jit
def attend_packed(
    run, queries, queries_behind, keys, start, stop, image, scale, MASKED: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, TAIL: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
):  # fmt: skip
    """Returns ``run: ImageRun`` after the slots ``start`` to ``stop`` of the windows in their order.

    MASKED: some of them are padding, or belong to another image than some queries.
    """
    acc, acc_behind, peak, total, window = run
    dim = tl.arange(0, LANES)[None, :]
    REST: tl.constexpr = TAIL if TAIL else 16
    rest = LANES + tl.arange(0, REST)[None, :]
    inside = tl.full([1, REST], 1, tl.int1) if LANES + REST == D else rest < D
    for at in range(start, stop, N):
        key = (window * WINDOW + at % WINDOW + tl.arange(0, N)).to(tl.int64)[:, None]
        stored = dim < D
        there = key >= 0
        keep = True
        if MASKED:
            seen = at % WINDOW + tl.arange(0, N) < tl.load(keys.real + window)
            stored = seen[:, None] & stored
            there = seen[:, None]
            keep = seen[None, :] & (image == tl.load(keys.segment + window))[:, None]
        following = (at + N) // WINDOW
        window = tl.load(keys.order + following, mask=following < keys.count, other=0)
        k = tl.load(keys.k + key * K_TOKEN + dim, mask=stored, other=0.0)
        v = tl.load(keys.v + key * V_TOKEN + dim, mask=stored, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if TAIL:
            k_behind = tl.load(keys.k + key * K_TOKEN + rest, mask=there & inside, other=0.0)
            v_behind = tl.load(keys.v + key * V_TOKEN + rest, mask=there & inside, other=0.0)
            scores = tl.dot(queries_behind, tl.trans(k_behind), scores, input_precision="ieee")
        weights, fade, peak, total = online_softmax.tile_weights(peak, total, scores, keep, scale, MASKED)
        shares = weights.to(v.dtype)
        acc = tl.dot(shares, v, acc * fade[:, None], input_precision="ieee")
        if TAIL:
            acc_behind = tl.dot(shares, v_behind, acc_behind * fade[:, None], input_precision="ieee")
    return ImageRun(acc, acc_behind, peak, total, window)
