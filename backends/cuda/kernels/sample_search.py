"""Thresholds by search, not by sorting: find the least key whose better ids weigh less than a bound.

Top-k keeps an id if fewer than k ids are better, top-p if the better ones' share is below p: the same condition with
two weights, monotone in the id's score, so bisection finds it. Ids of equal score are kept or dropped together. The
search reads only listed chunks; the list holds every chunk that can matter (``bound_for_share``, or the k-th best
chunk).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels.sample_scores import CHUNK, LOWEST, key_of, raw_of, scores_of

TOP_KEY: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LOW_KEY: tl.constexpr = tl.constexpr(-0x7FFFFFFF)


class ListedChunks(NamedTuple):
    """The chunks of a row that can still matter."""

    index: Any  # pointer, int32: the chunks' numbers, ascending
    count: Any  # int32


@triton.jit
def middle(low, high):
    """Returns the middle of two int32, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def listed_scores(begin, x, chunks, TILE: tl.constexpr):
    """Returns float32 scores [TILE, CHUNK] of the listed chunks ``begin`` ... of ``x: HeadRow``.

    The score is LOWEST beyond the end of the list.
    """
    position = begin + tl.arange(0, TILE)
    filled = position < chunks.count
    chunk = tl.load(chunks.index + position, mask=filled, other=0)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = filled[:, None] & (at < x.vocab)
    return scores_of(raw_of(x.logits + x.row * x.vocab, at, inside), at, inside, x)


@triton.jit
def weight_above(key, BY_MASS: tl.constexpr, peak, x, chunks, TILE: tl.constexpr):
    """Returns (weight of the listed ids above ``key``, the least key above it, the largest key not above it).

    An id weighs 1, or exp(its score - ``peak``) if BY_MASS.
    """
    weight = 0.0
    above = TOP_KEY
    under = LOW_KEY
    for begin in range(0, chunks.count, TILE):
        score = listed_scores(begin, x, chunks, TILE)
        keys = key_of(score)
        better = keys > key
        each = tl.where(better, tl.exp(score - peak) if BY_MASS else 1.0, 0.0)
        weight += tl.sum(tl.sum(each, 1), 0)
        above = tl.minimum(above, tl.min(tl.min(tl.where(better, keys, TOP_KEY), 1), 0))
        under = tl.maximum(under, tl.max(tl.max(tl.where(better, LOW_KEY, keys), 1), 0))
    return weight, above, under


@triton.jit
def least_kept(low, high, bound, BY_MASS: tl.constexpr, peak, x, chunks, TILE: tl.constexpr):
    """Returns the least key in (low, high] that is kept: the ids above it weigh less than ``bound``. ``high`` is kept.

    Each step moves to keys that occur, so the search ends after about log2(ids between) steps.
    """
    while low + 1 < high:
        key = middle(low, high)
        weight, above, under = weight_above(key, BY_MASS, peak, x, chunks, TILE)
        if weight < bound:
            low = tl.where(under > low, low, key - 1)
            high = tl.where(under > low, under, key)
        else:
            low = above - 1
    return high


@triton.jit
def kth_chunk(chunk_top, k):
    """Returns the k-th largest of the chunks' best scores: no id below it is among the k best."""
    keys = key_of(chunk_top)
    high = tl.max(keys, 0)
    low = tl.min(keys, 0) - 1
    while low + 1 < high:
        key = middle(low, high)
        if tl.sum((keys > key).to(tl.int32), 0) < k:
            high = key
        else:
            low = key
    return high


@triton.jit
def bound_for_share(chunk_top, chunk_mass, peak, total, share):
    """Returns a score below which at most 1 - ``share`` of the mass lies, from the chunks' best scores and masses
    alone.

    In a chunk with a best score at or above t, less than min(its mass without the best, 127 exp(t)) lies below t.
    """
    allowed = (1.0 - share) * total * 0.999 - 1e-6 * total
    rest = tl.maximum(chunk_mass - tl.exp(chunk_top - peak), 0.0) + 1e-7 * chunk_mass
    low = -64.0
    high = 0.0
    for _ in range(14):
        t = 0.5 * (low + high)
        each = tl.where(chunk_top - peak < t, chunk_mass, tl.minimum(rest, (CHUNK - 1) * tl.exp(t)))
        if tl.sum(each, 0) <= allowed:
            low = t
        else:
            high = t
    return tl.where((low <= -64.0) | (allowed <= 0.0), LOWEST, peak + low)
