"""Thresholds of top-k and top-p without sorting: the largest float that enough probability lies at or above.

A sort of the vocabulary costs a Gaudi more than all other parts of a draw. Both thresholds are the largest float t for
which the weight of the ids with a probability of at least t reaches a bound: a number of ids for top-k, a sum of
probabilities for top-p. The weight never grows with t, so t is found bit by bit, from its exponent to the last bit of
its mantissa, by products and sums that are exact: numbers of ids in float32, probabilities in whole units of 2^-30. It
is the probability at which a sorted list would be cut, so ids of equal probability stay or go together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trencadis.backends.cpu.sampler import count_units, find_bound

TINY = 2.0**-126
"""Smallest normal float32."""

EXPONENT_BITS, MANTISSA_BITS = 7, 23
"""Of a float32 from 2^-126 to 2; probabilities are not above 1."""


def largest_float(reaches: Callable[[Tensor | float], Tensor], like: Tensor) -> Tensor:
    """Returns [r, 1]: the largest float32 in [0, 2) for which ``reaches`` is true, which it is for 0 at least.

    Args:
        reaches: [r, 1] floats -> [r, 1] bool, which is false above some float of each row and true up to it.
        like: [r, 1] float32.
    """
    found = torch.where(reaches(TINY), torch.full_like(like, TINY), 0.0)
    for i in reversed(range(EXPONENT_BITS)):
        larger = found * 2.0 ** (2**i)
        found = torch.where(reaches(larger), larger, found)
    base = found.clamp_min(TINY)
    for i in range(1, MANTISSA_BITS + 1):
        larger = found + base * 2.0**-i
        found = torch.where(reaches(larger), larger, found)
    return found


def find_thresholds(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Returns [r, 1] least probability kept, as ``backends.cpu.sampler.thresholds`` finds it by sorting.

    Args:
        probs: float32 [r, V].
        top_k, top_p, min_p: [r]; 0, 1 and 0 let everything through.
    """
    vocab, best = probs.shape[1], probs.amax(-1, keepdim=True)
    count = torch.where(top_k > 0, top_k.clamp_max(vocab), vocab).float()[:, None]
    kth = largest_float(lambda t: (probs >= t).float().sum(-1, keepdim=True) >= count, best)
    least = torch.maximum(kth, min_p[:, None] * best)
    left = torch.where(probs >= least, probs, 0.0)

    def units_from(t: Tensor | float) -> Tensor:
        # Counted anew in each pass, since a pass would have to read a stored tensor of them beside ``left``.
        return count_units(torch.where(left >= t, left, 0.0)).sum(-1, keepdim=True, dtype=torch.int32)

    bound = find_bound(units_from(0.0), top_p)
    nucleus = largest_float(lambda t: units_from(t) >= bound, best)
    return torch.where(top_p[:, None] < 1.0, torch.maximum(least, torch.minimum(nucleus, best)), least)


def sum_units(probs: Tensor) -> Tensor:
    """Returns int32 [r, V + 1]: whole units of ``probs`` cumulated, and their sum, as draws and thresholds have them.

    They need more than the 24 bits of a float32: a card that adds int32 as floats is noticed.
    """
    units = count_units(probs)
    return torch.cat([units.cumsum(-1, dtype=torch.int32), units.sum(-1, keepdim=True, dtype=torch.int32)], -1)
