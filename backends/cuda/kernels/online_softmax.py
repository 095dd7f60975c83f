"""The step that all attention kernels share: add one tile of keys to a running softmax. float32 throughout.

Scores are kept in units of log2(e), so that exp2, which the hardware has, can be used; a masked score is -inf and the
running maximum starts finite, so that a row that sees no key at all gives 0 and never NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def attend_tile(acc, peak, total, q, k, v, keep, scale, MASKED: tl.constexpr):
    """Returns (acc, peak, total) after one more tile of keys.

    Args:
        acc: float32 [M, D] weighted values so far.
        peak, total: float32 [M] largest score and sum of weights so far.
        q, k, v: [M, D], [D, N] and [N, D].
        keep: bool, broadcastable to [M, N]: which scores count; read only if MASKED.
        scale: factor of the scores, log2(e) included.
    """
    weights, fade, peak, total = tile_weights(peak, total, tl.dot(q, k, input_precision="ieee"), keep, scale, MASKED)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def tile_weights(peak, total, scores, keep, scale, MASKED: tl.constexpr):
    """Returns (float32 [M, N] weights of a tile, [M] factor of earlier sums, new peak, new total)."""
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    best = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - best[:, None])
    fade = tl.exp2(peak - best)
    return weights, fade, best, total * fade + tl.sum(weights, 1)


@triton.jit
def add_sink(total, peak, sink):
    """Returns the sum of weights with that of a sink, a score without value that is not in units of log2(e).

    A sink far above all scores, or of a query that sees no key, leaves next to nothing of the others.
    """
    return total + tl.exp2(tl.minimum(sink * LOG2E - peak, 126.0))


@triton.jit
def finish(acc, total):
    """Returns the weighted mean, float32 [M, D]; 0 where no key was visible."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def gate_mean(mean, gate, there):
    """Returns ``mean`` times the sigmoid of the values at ``gate``, read where ``there``, of the type of ``mean``.

    A query that saw no key keeps its 0, whatever the gate of a padded token holds.
    """
    opened = tl.sigmoid(tl.load(gate, mask=there, other=0.0).to(tl.float32))
    return tl.where(mean == 0.0, 0.0, mean.to(tl.float32) * opened).to(mean.dtype)


@triton.jit
def join(acc, peak, total, more, high, size):
    """Joins (acc, peak, total) of keys with (``more``, ``high``, ``size``) of the keys after them.

    The fma is explicit, so that every kernel rounds alike; a part in which no key was visible changes no bit.
    """
    best = tl.maximum(peak, high)
    fade = tl.exp2(peak - best)
    share = tl.exp2(high - best)
    seen = size > 0
    wide = tl.broadcast_to(share[:, None], more.shape)
    acc = tl.where(seen[:, None], tl.fma(more, wide, acc * fade[:, None]), acc)
    total = tl.where(seen, tl.fma(size, share, total * fade), total)
    return acc, tl.where(seen, best, peak), total
