"""Fewer buckets where a plan has too many: those go first whose needs cost least more elsewhere. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trencadis.core.buckets import Bucket


def pruned(buckets: Sequence[Bucket], excess: int, cost: Callable[[Bucket], float]) -> tuple[Bucket, ...]:
    """``buckets`` less at most ``excess`` of them.

    A bucket can go where another one of its stage holds all that it holds, so every need that had a bucket has one. The
    price of its going is what that one costs over the cheapest bucket whose needs it takes on; the lowest goes first.
    """
    kept = set(buckets)
    least = {b: cost(b) for b in kept}
    heirs = {b: _heir(b, kept, cost) for b in kept}
    for _ in range(excess):
        prices = [(cost(heir) / least[b], b) for b, heir in heirs.items() if heir is not None]
        if not prices:
            break
        gone = min(prices)[1]
        heir = heirs.pop(gone)
        assert heir is not None
        kept.remove(gone)
        least[heir] = min(least[heir], least[gone])
        for b in [b for b, other in heirs.items() if other == gone]:
            heirs[b] = _heir(b, kept, cost)
    return tuple(sorted(kept))


def _heir(bucket: Bucket, kept: set[Bucket], cost: Callable[[Bucket], float]) -> Bucket | None:
    """The cheapest other bucket that holds what ``bucket`` holds."""
    others = (b for b in kept if b.stage is bucket.stage and b.variant == bucket.variant and b != bucket)
    larger = [b for b in others if all(x >= y for x, y in zip(b.dims, bucket.dims, strict=True))]
    return min(larger, key=lambda b: (cost(b), b), default=None)
