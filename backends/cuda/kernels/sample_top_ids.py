"""Finds the 20 best ids of a row by raw logit, best first, the lower id first among equals.

They are in the 20 chunks with the largest maxima: each of these has an id that ranks before all ids of other chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels.sample_scores import CHUNK, LOWEST, float_of, key_of, raw_of

NONE: tl.constexpr = tl.constexpr(-(1 << 63) + 1)


@triton.jit
def pack_ordered(x, number):
    """Packs into int64 keys: the larger float is larger, and among equals the lower number."""
    return (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def number_of(pack):
    """Returns the number in a key of ``pack_ordered``."""
    return 0x7FFFFFFF - (pack & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def log_sum(chunk_raw, chunk_raw_mass, row, lane, CHUNKS: tl.constexpr):
    """Returns log(sum(exp(raw logits))) of a row, from its chunks."""
    real = lane < CHUNKS
    top = tl.load(chunk_raw + row * CHUNKS + lane, mask=real, other=LOWEST)
    mass = tl.load(chunk_raw_mass + row * CHUNKS + lane, mask=real, other=0.0)
    peak = tl.max(top, 0)
    return peak + tl.log(tl.sum(mass * tl.exp(top - peak), 0))


@triton.jit
def logprob_of(raw, total):
    """Returns float32 log-probabilities; -inf if the logit is -inf."""
    return tl.where(raw <= LOWEST, float("-inf"), raw - total)


@triton.jit
def best(
    logits, row, chunk_raw, chunk_raw_mass, top_id, top_logprob,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_POW: tl.constexpr, TOP: tl.constexpr, TOP_POW: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, CHUNKS_POW)
    total = log_sum(chunk_raw, chunk_raw_mass, row, lane, CHUNKS)
    peaks = tl.load(chunk_raw + row * CHUNKS + lane, mask=lane < CHUNKS, other=LOWEST)
    left = tl.where(lane < CHUNKS, pack_ordered(peaks, lane), NONE)
    slot = tl.arange(0, TOP_POW)
    chosen = tl.full([TOP_POW], NONE, tl.int64)
    for i in range(TOP):
        first = tl.max(left, 0)
        chosen = tl.where(slot == i, first, chosen)
        left = tl.where(left == first, NONE, left)

    at = number_of(chosen)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (chosen > NONE)[:, None] & (at < VOCAB)
    left = tl.where(inside, pack_ordered(raw_of(logits + row * VOCAB, at, inside), at), NONE)
    chosen = tl.full([TOP_POW], NONE, tl.int64)
    for i in range(TOP):
        first = tl.max(tl.max(left, 1), 0)
        chosen = tl.where(slot == i, first, chosen)
        left = tl.where(left == first, NONE, left)
    tl.store(top_id + row * TOP + slot, number_of(chosen), mask=slot < TOP)
    raw = float_of((chosen >> 32).to(tl.int32))
    tl.store(top_logprob + row * TOP + slot, logprob_of(raw, total), mask=slot < TOP)


@triton.jit
def better(
    logits, row, own, chunk_raw, first,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, SHARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts the raw logits of SHARE chunks from ``first`` on that exceed ``own``; chunks without one are not read."""
    count = tl.zeros([TILE, CHUNK], tl.int32)
    for begin in range(0, SHARE, TILE):
        chunk = first + begin + tl.arange(0, TILE)
        real = (chunk < CHUNKS) & (begin + tl.arange(0, TILE) < SHARE)
        wanted = tl.load(chunk_raw + row * CHUNKS + chunk, mask=real, other=LOWEST) > own
        at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        count += (raw_of(logits + row * VOCAB, at, wanted[:, None] & (at < VOCAB)) > own).to(tl.int32)
    return tl.sum(tl.sum(count, 1), 0)
