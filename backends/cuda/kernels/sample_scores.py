"""Computes the scores that are drawn from: raw logits with bias, penalties, mask and temperature; float32.

A feature that a row does not use costs one comparison: counts, seen bits, masks and bias pairs are read only where
they have an effect. A masked id scores LOWEST, which is finite, so that a fully masked row stays free of NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
CHUNK: tl.constexpr = tl.constexpr(128)
"""Number of neighbouring ids that share one summary: the second kernel searches chunk by chunk."""


class HeadRow(NamedTuple):
    """Inputs of the scores of one row, as the helpers of a kernel pass them on."""

    logits: tl.tensor  # pointer, [rows, vocab]
    row: tl.tensor  # int64
    slot: tl.tensor  # int64 of the row's sampler state
    mask_row: tl.tensor  # int64; 0: every id is allowed
    inverse: tl.tensor  # float32 1 / temperature
    pairs: tl.tensor  # int32 from ``pairs_of``
    repetition: tl.tensor  # pointer, float32 [rows]
    frequency: tl.tensor  # pointer, float32 [rows]
    presence: tl.tensor  # pointer, float32 [rows]
    counts: tl.tensor  # pointer, int32 [slots, vocab]
    seen: tl.tensor  # pointer, uint8 [slots, mask_bytes]
    bias_id: tl.tensor  # pointer, int64 [slots, bias_pairs]
    bias_value: tl.tensor  # pointer, float32 [slots, bias_pairs]
    masks: tl.tensor  # pointer, uint8 [masks, mask_bytes]
    vocab: tl.tensor  # int32, like the two below a constant of the launch
    mask_bytes: tl.tensor
    bias_pairs: tl.tensor


@triton.jit
def key_of(x):
    """Returns int32 keys in the order of the floats; -0 and 0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def float_of(key):
    """Inverts ``key_of``."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def raw_of(logits, at, inside):
    """Returns float32 logits; LOWEST outside, for -inf and for NaN."""
    return tl.maximum(tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32), LOWEST)


@triton.jit
def pairs_of(bias_value, slot, PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr):
    """Returns how many of the slot's bias pairs must be read; 0 for a row without a bias, whose first value is 0."""
    pairs = 0
    if tl.load(bias_value + slot * PAIRS) != 0.0:
        pair = tl.arange(0, PAIRS_POW)
        value = tl.load(bias_value + slot * PAIRS + pair, mask=pair < PAIRS, other=0.0)
        pairs = tl.max(tl.where(value != 0.0, pair + 1, 0), 0)
    return pairs


@triton.jit
def scores_of(raw, at, inside, x):
    """Returns float32 scores of the ids ``at`` of ``x: HeadRow``, whose logits are ``raw``.

    The score is LOWEST where an id is masked or not ``inside``.
    """
    y = raw
    for pair in range(0, x.pairs):
        value = tl.load(x.bias_value + x.slot * x.bias_pairs + pair)
        y += tl.where(at == tl.load(x.bias_id + x.slot * x.bias_pairs + pair), value, 0.0)
    repeat = tl.load(x.repetition + x.row)
    often = tl.load(x.frequency + x.row)
    once = tl.load(x.presence + x.row)
    if (repeat != 1.0) | (often != 0.0) | (once != 0.0):
        count = tl.load(x.counts + x.slot * x.vocab + at, mask=inside, other=0)
        byte = tl.load(x.seen + x.slot * x.mask_bytes + at // 8, mask=inside, other=0).to(tl.int32)
        drawn = count > 0
        known = drawn | (((byte >> (at % 8)) & 1) > 0)
        y = tl.where(known, tl.where(y > 0, y / repeat, y * repeat), y)
        y = y - often * count.to(tl.float32) - once * drawn.to(tl.float32)
    y = tl.maximum(y * x.inverse, LOWEST)
    if x.mask_row > 0:
        byte = tl.load(x.masks + x.mask_row * x.mask_bytes + at // 8, mask=inside, other=0).to(tl.int32)
        y = tl.where(((byte >> (at % 8)) & 1) > 0, y, LOWEST)
    return tl.where(inside, y, LOWEST)
