"""The head's pass over all logits: summarises each chunk of 128 ids for the second kernel.

This pass reads every logit once. The second kernel reads a few thousand summaries per row, and rereads only the chunks
that can still matter. Grid: (parts of a row, rows).

Finds the 20 best ids of a row by raw logit, best first, the lower id first among equals.

They are in the 20 chunks with the largest maxima: each of these has an id that ranks before all ids of other chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels.sample_scores import (
    CHUNK,
    LOWEST,
    HeadRow,
    float_of,
    key_of,
    pairs_of,
    raw_of,
    scores_of,
)
from trencadis.core import request

GREEDY_BELOW: tl.constexpr = tl.constexpr(request.GREEDY_BELOW)
"""Temperatures below this select the argmax."""


@triton.jit
def inverse_of(temperature):
    """Returns 1 / temperature, or 1 for a greedy row, whose scores are not scaled."""
    return tl.where(temperature < GREEDY_BELOW, 1.0, 1.0 / tl.maximum(temperature, GREEDY_BELOW))


@triton.jit
def parts_kernel(
    logits, slots, temperature, mask_rows, repetition, frequency, presence, counts, seen, bias_id, bias_value, masks,
    chunk_raw, chunk_raw_mass, chunk_top, chunk_mass,
    VOCAB: tl.constexpr, BYTES: tl.constexpr, PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr, CHUNKS: tl.constexpr,
    SHARE: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    """Summarises SHARE chunks.

    Masses are sums of exp(x - largest x of the chunk); no sum crosses warps. Masses of raw logits are only needed for
    log-probabilities (TOLD).
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    chunk = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = at < VOCAB
    real = chunk < CHUNKS
    to = row * CHUNKS + chunk
    raw = raw_of(logits + row * VOCAB, at, inside)
    if TOLD:
        top = tl.max(raw, 1)
        tl.store(chunk_raw + to, top, mask=real)
        tl.store(chunk_raw_mass + to, tl.sum(tl.exp(raw - top[:, None]), 1), mask=real)

    x = HeadRow(
        logits, row, slot, tl.load(mask_rows + row), inverse_of(tl.load(temperature + row)),
        pairs_of(bias_value, slot, PAIRS, PAIRS_POW), repetition, frequency, presence,
        counts, seen, bias_id, bias_value, masks, VOCAB, BYTES, PAIRS,
    )  # fmt: skip
    score = scores_of(raw, at, inside, x)
    best = tl.max(score, 1)
    tl.store(chunk_top + to, best, mask=real)
    tl.store(chunk_mass + to, tl.sum(tl.exp(score - best[:, None]), 1), mask=real)


@triton.jit
def greedy_parts_kernel(logits, best, where, VOCAB: tl.constexpr, TILE: tl.constexpr, SHARES: tl.constexpr):
    """Writes the largest logit of a share and its lowest id."""
    share = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = share * TILE + tl.arange(0, TILE)
    raw = raw_of(logits + row * VOCAB, at, at < VOCAB)
    peak = tl.max(raw, 0)
    tl.store(best + row * SHARES + share, peak)
    tl.store(where + row * SHARES + share, tl.min(tl.where(raw == peak, at, VOCAB - 1), 0))


@triton.jit
def greedy_pick_kernel(best, where, slots, last, token, SHARES: tl.constexpr, SHARES_POW: tl.constexpr):
    """Picks the lowest id with the largest logit and stores it as the slot's last token, except in slot 0, the sink."""
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES_POW)
    real = share < SHARES
    peak = tl.load(best + row * SHARES + share, mask=real, other=LOWEST)
    index = tl.load(where + row * SHARES + share, mask=real, other=0x7FFFFFFF)
    picked = tl.min(tl.where(real & (peak == tl.max(peak, 0)), index, 0x7FFFFFFF), 0)
    tl.store(token + row, picked)
    slot = tl.load(slots + row)
    if slot > 0:
        tl.store(last + slot, picked)


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
def find_best_ids(
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
def count_better(
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
