"""Draws one row's token: argmax, or the id at which the cumulated probability of the kept ids passes the uniform
number.

Chunks are cumulated first, then the ids of the chunk that passes. If rounding keeps the sum from ever passing, the last
id of positive probability is taken, never a filtered one.

Thresholds by search, not by sorting: find the least key whose better ids weigh less than a bound.

Top-k keeps an id if fewer than k ids are better, top-p if the better ones' share is below p: the same condition with
two weights, monotone in the id's score, so bisection finds it. Ids of equal score are kept or dropped together. The
search reads only listed chunks; the list holds every chunk that can matter (``bound_for_share``, or the k-th best
chunk).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels.sample_scores import CHUNK, LOWEST, float_of, key_of, raw_of, scores_of

TOP_KEY: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LOW_KEY: tl.constexpr = tl.constexpr(-0x7FFFFFFF)


class ListedChunks(NamedTuple):
    """The chunks of a row that can still matter."""

    index: tl.tensor  # pointer, int32: the chunks' numbers, ascending
    count: tl.tensor  # int32


@triton.jit
def find_middle(low, high):
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
        key = find_middle(low, high)
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
        key = find_middle(low, high)
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


FAR: tl.constexpr = tl.constexpr(0x7FFFFFFF)


class DrawParams(NamedTuple):
    """Sampling parameters of one row."""

    top_k: tl.tensor  # int32; 0: no limit
    top_p: tl.tensor  # float32
    min_p: tl.tensor  # float32
    uniform: tl.tensor  # float32 in [0, 1)
    greedy: tl.tensor  # bool: take the argmax, whatever the other fields are


@triton.jit
def compact(index, chosen, lane):
    """Writes the numbers of the chosen lanes to ``index`` in ascending order; returns their count."""
    flag = chosen.to(tl.int32)
    position = tl.cumsum(flag, 0) - 1
    # Other threads of this program may still be reading the previous list.
    tl.debug_barrier()
    tl.store(index + position, lane, mask=chosen)
    tl.debug_barrier()
    return tl.sum(flag, 0)


@triton.jit
def passing(mass, before, goal, lane):
    """Returns (first lane whose running sum passes ``goal``, sum before it, last lane of positive mass, sum before
    it).
    """
    running = before + tl.cumsum(mass, 0)
    some = mass > 0
    first = tl.min(tl.where(some & (running > goal), lane, FAR), 0)
    last = tl.max(tl.where(some, lane, -1), 0)
    prior = running - mass
    return first, tl.sum(tl.where(lane == first, prior, 0.0), 0), last, tl.sum(tl.where(lane == last, prior, 0.0), 0)


@triton.jit
def kept_mass(score, least, peak):
    """Returns exp(score - peak) of the ids that the filters keep, 0 for the others."""
    return tl.where(key_of(score) >= least, tl.exp(score - peak), 0.0)


@triton.jit
def floor_of(chunk_top, chunk_mass, peak, total, k, p, smallest, CHUNKS: tl.constexpr):
    """Returns a lower bound of the kept scores, slightly reduced: the first kernel may have rounded differently."""
    floor = LOWEST
    if (k > 0) & (k < CHUNKS):
        floor = float_of(kth_chunk(chunk_top, k))
    if smallest > 0:
        floor = tl.maximum(floor, peak + tl.log(smallest))
    elif k <= 0:
        floor = bound_for_share(chunk_top, chunk_mass, peak, total, p)
    return tl.maximum(floor - 1e-5 * (1.0 + tl.abs(floor)), LOWEST)


@triton.jit
def least_of_filters(x, want, chunks, peak, total, floor, TILE: tl.constexpr):
    """Returns the least key that top-k, top-p and min-p keep of the listed chunks, which contain every score from
    ``floor`` on.
    """
    least = LOW_KEY
    bottom = key_of(floor)
    # The largest key as this kernel computes it: the first kernel may have rounded differently.
    _, _, high = weight_above(FAR, False, peak, x, chunks, TILE)
    if want.min_p > 0:
        limit = tl.minimum(key_of(peak + tl.log(want.min_p)), high)
        least = tl.maximum(least, limit)
    if want.top_k > 0:
        bound = tl.minimum(want.top_k, x.vocab).to(tl.float32)
        kth = least_kept(tl.maximum(least, bottom) - 1, high, bound, False, peak, x, chunks, TILE)
        least = tl.maximum(least, kth)
    if want.top_p < 1.0:
        left = total
        if (want.top_k > 0) | (want.min_p > 0):
            left, _, _ = weight_above(least - 1, True, peak, x, chunks, TILE)
        nucleus = least_kept(tl.maximum(least, bottom) - 1, high, want.top_p * left, True, peak, x, chunks, TILE)
        least = tl.maximum(least, nucleus)
    return least


@triton.jit
def passing_chunk(x, want, chunks, least, peak, TILE: tl.constexpr):
    """Returns (the listed chunk that the draw falls into, kept mass before it, the mass at which the draw falls)."""
    kept = 0.0
    for begin in range(0, chunks.count, TILE):
        kept += tl.sum(tl.sum(kept_mass(listed_scores(begin, x, chunks, TILE), least, peak), 1), 0)
    goal = want.uniform * kept
    position = FAR
    before = 0.0
    fallback = 0
    prior = 0.0
    sum_to = 0.0
    for begin in range(0, chunks.count, TILE):
        each = tl.sum(kept_mass(listed_scores(begin, x, chunks, TILE), least, peak), 1)
        first, at_first, last, at_last = passing(each, sum_to, goal, tl.arange(0, TILE))
        if position == FAR:
            if first < FAR:
                position = begin + first
                before = at_first
            elif last >= 0:
                fallback = begin + last
                prior = at_last
        sum_to += tl.sum(each, 0)
    if position == FAR:
        position = fallback
        before = prior
    return tl.load(chunks.index + position), before, goal


@triton.jit
def draw(x, want, chunk_top, chunk_mass, index, CHUNKS: tl.constexpr, CHUNKS_POW: tl.constexpr, TILE: tl.constexpr):
    """Draws an int32 id in [0, VOCAB) of ``x: HeadRow`` by ``want: DrawParams``.

    ``index``: int32 [CHUNKS], memory for the list of chunks.
    """
    lane = tl.arange(0, CHUNKS_POW)
    real = lane < CHUNKS
    best = tl.load(chunk_top + x.row * CHUNKS + lane, mask=real, other=LOWEST)
    peak = tl.max(best, 0)
    mass = tl.load(chunk_mass + x.row * CHUNKS + lane, mask=real, other=0.0) * tl.exp(best - peak)
    total = tl.sum(mass, 0)

    least = LOW_KEY
    chunk = 0
    before = 0.0
    goal = 0.0
    if want.greedy:
        chunk = tl.min(tl.where(real & (best == peak), lane, CHUNKS - 1), 0)
    elif (want.top_k > 0) | (want.top_p < 1.0) | (want.min_p > 0):
        floor = floor_of(best, mass, peak, total, want.top_k, want.top_p, want.min_p, CHUNKS)
        chunks = ListedChunks(index, compact(index, real & (best >= floor), lane))
        least = least_of_filters(x, want, chunks, peak, total, floor, TILE)
        chunk, before, goal = passing_chunk(x, want, chunks, least, peak, TILE)
    else:
        goal = want.uniform * total
        first, at_first, last, at_last = passing(mass, 0.0, goal, lane)
        chunk = tl.where(first < FAR, first, tl.maximum(last, 0))
        before = tl.where(first < FAR, at_first, at_last)

    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < x.vocab
    score = scores_of(raw_of(x.logits + x.row * x.vocab, at, inside), at, inside, x)
    if want.greedy:
        token = tl.min(tl.where(inside & (score == tl.max(score, 0)), at, x.vocab - 1), 0)
    else:
        first, _, last, _ = passing(kept_mass(score, least, peak), before, goal, at)
        token = tl.where(first < FAR, first, last)
    return tl.minimum(tl.maximum(token, 0), x.vocab - 1)
