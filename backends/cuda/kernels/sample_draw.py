"""Draws one row's token: argmax, or the id at which the cumulated probability of the kept ids passes the uniform
number.

Chunks are cumulated first, then the ids of the chunk that passes. If rounding keeps the sum from ever passing, the last
id of positive probability is taken, never a filtered one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels.sample_scores import CHUNK, LOWEST, float_of, key_of, raw_of, scores_of
from trencadis.backends.cuda.kernels.sample_search import (
    LOW_KEY,
    ListedChunks,
    bound_for_share,
    kth_chunk,
    least_kept,
    listed_scores,
    weight_above,
)

FAR: tl.constexpr = tl.constexpr(0x7FFFFFFF)


class DrawParams(NamedTuple):
    """Sampling parameters of one row."""

    top_k: Any  # int32; 0: no limit
    top_p: Any  # float32
    min_p: Any  # float32
    uniform: Any  # float32 in [0, 1)
    greedy: Any  # bool: take the argmax, whatever the other fields are


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
