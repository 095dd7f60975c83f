"""Prunes a plan with too many buckets: first drops the buckets that are cheapest to absorb into a larger one.

Pure Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trencadis.core.buckets import Bucket


def pruned(buckets: Sequence[Bucket], excess: int, cost: Callable[[Bucket], float]) -> tuple[Bucket, ...]:
    """Returns ``buckets`` without up to ``excess`` of them.

    A bucket may be dropped if a larger one of its stage absorbs its needs. The price is the cost of the larger one
    divided by that of the smallest bucket whose needs it then covers; the bucket with the lowest price is dropped
    first.
    """
    kept = set(buckets)
    least = {b: cost(b) for b in kept}
    heirs = {b: _heir(b, kept, cost) for b in kept}
    for _ in range(excess):
        prices = [(cost(heir) / least[b], b) for b, heir in heirs.items() if heir is not None]
        if not prices:
            break
        dropped = min(prices)[1]
        heir = heirs.pop(dropped)
        assert heir is not None
        kept.remove(dropped)
        least[heir] = min(least[heir], least[dropped])
        for b in [b for b, other in heirs.items() if other == dropped]:
            heirs[b] = _heir(b, kept, cost)
    return tuple(sorted(kept))


def _heir(bucket: Bucket, kept: set[Bucket], cost: Callable[[Bucket], float]) -> Bucket | None:
    """Returns the cheapest other bucket that holds all needs of ``bucket``; None if there is none."""
    others = (b for b in kept if b.stage is bucket.stage and b.variant == bucket.variant and b != bucket)
    larger = [b for b in others if all(x >= y for x, y in zip(b.dims, bucket.dims, strict=True))]
    return min(larger, key=lambda b: (cost(b), b), default=None)
