"""Attention over keys in the paged cache: the loop that prefill and decode share.

The ids of a tile's blocks are read one tile ahead and carried through the loop. If they were read where they are
used, the compiler would spend half of its pipeline stages on them and no longer load keys during a product.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels import online_softmax


class PagedKeys(NamedTuple):
    """The stored keys of one row and KV head."""

    k: tl.tensor  # pointer, [blocks, BLOCK, KV heads, D], starting at the KV head
    v: tl.tensor
    table: tl.tensor  # pointer, int32: the row's block ids
    stop: tl.tensor  # int32: keys from here on are not read


class KeyRanges(NamedTuple):
    """The stored keys that a tile of queries sees, in three ranges: seen by some queries, by all, and by some again."""

    begin: tl.tensor  # int32, a multiple of N: start of the first query window
    edge: tl.tensor  # from here on every query's window has begun; equal to ``begin`` without a window
    whole: tl.tensor  # all keys from ``edge`` to here are seen by every query
    stop: tl.tensor
    first: tl.tensor  # int32, broadcastable to [M, 1]: the first key that a query sees; read only with a window
    last: tl.tensor  # the last key that a query sees


class RunningAttention(NamedTuple):
    """Attention over the keys so far, and the block ids of the next tile."""

    acc: tl.tensor  # float32 [M, LANES]
    peak: tl.tensor  # float32 [M]
    total: tl.tensor  # float32 [M]
    ids: tl.tensor  # block ids of the next tile, from ``ids_of``


@triton.jit
def ids_of(table, start, stop, N: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the block ids of the keys start, start + 1 ... (start is a multiple of N), ZERO from ``stop`` on.

    One id if a block holds whole tiles, else int32 [N], one per key.
    """
    if BLOCK % N == 0:
        return tl.load(table + start // BLOCK, mask=start < stop, other=0)
    else:
        key = start + tl.arange(0, N)
        return tl.load(table + key // BLOCK, mask=key < stop, other=0)


@triton.jit
def slots_of(ids, start, N: tl.constexpr, BLOCK: tl.constexpr):
    """Returns int64 [N]: cache slots of the keys start, start + 1 ..., whose block ids are ``ids``."""
    return ids.to(tl.int64) * BLOCK + (start + tl.arange(0, N)) % BLOCK


@triton.jit
def start_run(keys, start, M: tl.constexpr, LANES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Returns ``RunningAttention`` before the key ``start``."""
    acc = tl.zeros([M, LANES], tl.float32)
    peak = tl.full([M], online_softmax.LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    return RunningAttention(acc, peak, total, ids_of(keys.table, start, keys.stop, N, BLOCK))


@triton.jit
def attend_keys(
    run, queries, keys, start, stop, first, last, scale, MASKED: tl.constexpr, ONCE: tl.constexpr, WINDOW: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, KV_TOKEN: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns ``run: RunningAttention`` after the tiles of N keys from ``start`` to ``stop``.

    Args:
        queries: [M, LANES].
        keys: ``PagedKeys``.
        first, last: int32, broadcastable to [M, 1]: the keys that a query sees; read only if MASKED, ``first`` only
            if there is a WINDOW.
        scale: factor of the scores, log2(e) included.
        MASKED: some queries do not see some of the keys, or a tile goes beyond ``keys.stop``.
        ONCE: there is at most one tile.
    """
    acc, peak, total, ids = run
    dim = tl.arange(0, LANES)
    for key in tl.range(start, stop, N, num_stages=1 if ONCE else None):
        slots = slots_of(ids, key, N, BLOCK)[:, None] * KV_TOKEN + dim[None, :]
        if not ONCE:
            ids = ids_of(keys.table, key + N, keys.stop, N, BLOCK)
        stored = (dim < D)[None, :]
        keep = True
        if MASKED:
            seen = key + tl.arange(0, N)
            stored = (seen < keys.stop)[:, None] & stored
            keep = seen[None, :] <= last
            if WINDOW > 0:
                keep = keep & (seen[None, :] >= first)
        k = tl.load(keys.k + slots, mask=stored, other=0.0)
        v = tl.load(keys.v + slots, mask=stored, other=0.0)
        acc, peak, total = online_softmax.attend_tile(acc, peak, total, queries, tl.trans(k), v, keep, scale, MASKED)
    return RunningAttention(acc, peak, total, ids)


@triton.jit
def attend_reach(
    run, queries, keys, reach, scale, ONCE: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    KV_TOKEN: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns ``run: RunningAttention`` after all keys of ``reach: KeyRanges``; ONCE: from ``whole`` on there is at
    most one tile.
    """
    begin, edge, whole, stop, first, last = reach
    if WINDOW > 0:
        run = attend_keys(
            run, queries, keys, begin, edge, first, last, scale, True, False, WINDOW, N, BLOCK, KV_TOKEN, D, LANES
        )
    run = attend_keys(run, queries, keys, edge, whole, 0, 0, scale, False, False, WINDOW, N, BLOCK, KV_TOKEN, D, LANES)
    return attend_keys(
        run, queries, keys, whole, stop, first, last, scale, True, ONCE, WINDOW, N, BLOCK, KV_TOKEN, D, LANES
    )
