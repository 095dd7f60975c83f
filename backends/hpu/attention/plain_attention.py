"""Attention by plain operations: scores, softmax, and the merging of parts attended to one after the other.

Nothing here reads a value on the host, and no score row is ever fully hidden: every row sees at least a key of zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trencadis.backends.hpu.attention.attention_input_types import AttentionKernels
from trencadis.backends.hpu.habana_bridge import AttentionPart

QUERY_TILE = 1024
"""Number of queries whose mask, or scores, exist at a time."""

SCORES = QUERY_TILE * 8192
"""Maximum scores of a head that exist at a time without a fused kernel: over more keys a tile has fewer queries."""

MASK_BYTES = (1 << 31) - 1
"""The fused kernel addresses a head's mask by 32 signed bits; a larger mask gives NaN, without an error."""

MASK_ITEM = 2
"""Bytes of one value of a mask in the kernel, which may widen booleans to bfloat16."""

Cut = Callable[[], None]


def lowest(dtype: torch.dtype) -> float:
    """Returns the value of a hidden score, which must be finite."""
    return torch.finfo(dtype).min


def softmax_mode(dtype: torch.dtype, fp32: bool, otherwise: str) -> str:
    """Returns the fused kernel's softmax mode.

    It offers ``fp32`` and ``fast`` for bfloat16 only; other dtypes are float32 inside anyway.
    """
    if dtype != torch.bfloat16:
        return "None"
    return "fp32" if fp32 else otherwise


def mask_rows(keys: int, most: int = QUERY_TILE) -> int:
    """Returns how many queries a masked call over ``keys`` may have: a head's mask stays below ``MASK_BYTES``; a
    multiple of 64.
    """
    return max(min(most, MASK_BYTES // (MASK_ITEM * keys) // 64 * 64), 64)


def plain_rows(keys: int) -> int:
    """Returns how many queries a plain tile over ``keys`` has."""
    return max(min(QUERY_TILE, SCORES // keys // 64 * 64), 64)


def times(a: Tensor, b: Tensor, fp32: bool, kernels: AttentionKernels) -> Tensor:
    """Returns scores [..., S, d] @ [..., d, T], float32 if ``fp32``.

    Keys stay in their own type: as float32 they would be written and read again at twice their bytes. Where the card
    has no product of bfloat16 into float32, a bfloat16 product is widened, which keeps its rounding, 2**-9 of the
    largest score; ``kernels.exact`` widens keys instead.
    """
    if not fp32 or a.dtype == torch.float32:
        return multiply(a, b)
    if a.dtype == torch.bfloat16 and kernels.product is not None:
        return kernels.product(a, b)
    return multiply(a.float(), b.float()) if kernels.exact else multiply(a, b).float()


def weigh(share: Tensor, v: Tensor) -> Tensor:
    """Returns the values v [..., T, d] weighted by ``share`` [..., S, T], which has their type: a sum in float32,
    rounded once.
    """
    return multiply(share, v)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b; three dimensions take one operation where ``matmul`` takes five."""
    return torch.bmm(a, b) if a.dim() == b.dim() == 3 else a @ b


def weights(scores: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Returns softmax(scores * scale) over the last dimension, for the keys that are ``visible``."""
    return (scores * scale).masked_fill(~visible, lowest(scores.dtype)).softmax(-1)


def plain(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, fp32: bool, kernels: AttentionKernels
) -> Tensor:
    """Computes attention [R, h, S, d] over [R, g, T, d]; ``visible`` is a boolean that broadcasts to [R, 1, S, T]."""
    scores = _folded_scores(q, k, fp32, kernels)
    if kernels.sinks is None:
        share = weights(scores, scale, visible[:, :, None])
    else:
        scores = (scores * scale).masked_fill(~visible[:, :, None], lowest(scores.dtype))
        own = kernels.sinks.to(scores.dtype).view(1, scores.shape[1], scores.shape[2], 1, 1)
        joined = torch.cat([scores, own.expand(len(scores), -1, -1, scores.shape[3], -1)], dim=-1)
        share = joined.softmax(-1)[..., : k.shape[2]]
    return (share.to(v.dtype).reshape(len(k), k.shape[1], -1, k.shape[2]) @ v).view(q.shape)


def plain_part(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, fp32: bool, kernels: AttentionKernels
) -> AttentionPart:
    """Computes ``plain`` attention and returns it with its statistics."""
    scores = _folded_scores(q, k, fp32, kernels) * scale
    scores = scores.masked_fill(~visible[:, :, None], lowest(scores.dtype))
    high = scores.amax(-1, keepdim=True)
    share = (scores - high).exp()
    stats = (*q.shape[:3], 1)
    inverse = share.sum(-1, keepdim=True).reciprocal().view(stats)
    out = weigh(share.to(v.dtype).view(len(k), k.shape[1], -1, k.shape[2]), v)
    return AttentionPart(out.view(q.shape) * inverse, high.view(stats), inverse)


def _folded_scores(q: Tensor, k: Tensor, fp32: bool, kernels: AttentionKernels) -> Tensor:
    """Returns scores [R, g, h / g, S, T].

    Query heads that share a KV head are multiplied as further queries of it, so that no key is repeated.
    """
    rows, heads, count, d = q.shape
    groups = k.shape[1]
    scores = times(q.reshape(rows, groups, -1, d), k.transpose(2, 3), fp32, kernels)
    return scores.view(rows, groups, heads // groups, count, -1)


class MergedParts:
    """Merges attention over parts of a row's keys, in float32, as the parts arrive.

    A part weighs exp(L), where L = high - log(inverse) is the logarithm of its sum of exponentials. Of two parts, the
    second one's share is sigmoid(L2 - L1), and both together have L = log(exp(L1) + exp(L2)).
    """

    def __init__(self, first: AttentionPart) -> None:
        self._out, self._logarithm = first.out.float(), _logarithm(first)

    def add(self, part: AttentionPart, weight: Tensor) -> None:
        """Merges ``part``; ``weight``, float32 [1], is added to its logarithm (``SlicedContext``)."""
        other = _logarithm(part) + weight
        self._out = torch.lerp(self._out, part.out.float(), (other - self._logarithm).sigmoid())
        self._logarithm = torch.logaddexp(self._logarithm, other)

    def out(self, sinks: Tensor | None = None) -> Tensor:
        """Returns the merged attention, float32 [1, h, T, d]; ``sinks``: float32 [h]."""
        return self._out if sinks is None else self._out * (self._logarithm - sinks.view(1, -1, 1, 1)).sigmoid()


def _logarithm(part: AttentionPart) -> Tensor:
    """Returns high - log(inverse), float32 [1, h, T, 1]."""
    return part.high - part.inverse.float().log()
