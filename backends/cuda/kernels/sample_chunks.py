"""The head's pass over all logits: summarises each chunk of 128 ids for the second kernel.

This pass reads every logit once. The second kernel reads a few thousand summaries per row, and rereads only the chunks
that can still matter. Grid: (parts of a row, rows).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trencadis.backends.cuda.kernels.sample_scores import CHUNK, LOWEST, HeadRow, pairs_of, raw_of, scores_of
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
