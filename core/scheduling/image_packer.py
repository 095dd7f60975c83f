"""Selects the images of the next VISION launch. Pure Python.

A step has at most one VISION launch, so that other rows wait for no more than one. For each planned bucket, the waiting
images are packed first-fit, oldest first; the bucket with the lowest cost per needed slot wins. The cost of a launch
includes that of a decode step, because images that are left over wait for another step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trencadis.core.bucket_plan import Plan
from trencadis.core.buckets import ENCODER_SLOTS, Stage


@dataclass(frozen=True)
class ImagePacker:
    """Chooses the images of a launch.

    Args:
        plan: buckets and their costs; None: every size is its own bucket.
        budget: slots of one launch. A larger image gets a launch of its own, whose padding smaller images may use.
    """

    plan: Plan | None = None
    budget: int = ENCODER_SLOTS

    def choose(self, needs: Sequence[int]) -> list[int]:
        """Returns the indices of the images to launch together; the oldest, ``needs[0]``, is always included.

        Args:
            needs: slots of each waiting image, the oldest first.
        """
        if not needs:
            return []
        options = [first_fit(needs, size) for size in self._capacities(needs[0])]
        return min(options, key=lambda chosen: self._per_slot(sum(needs[i] for i in chosen)))

    def _capacities(self, oldest: int) -> list[int]:
        """Returns the slots of the launches to compare, the largest first, so that it wins ties."""
        if self.plan is None:
            return [max(self.budget, oldest)]
        sizes = self._sizes
        unplanned = oldest > sizes[-1] if sizes else self.plan.policy.captures
        if unplanned:
            # The oldest image needs an unplanned shape; launched alone, it causes only one.
            return [oldest]
        most = max(self.budget, self.plan.fit(Stage.VISION, (oldest,)).dims[0])
        fitting = [s for s in sizes if oldest <= s <= most]
        return list(reversed(fitting or [most]))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Ascending sizes of the plan or of the policy's own list; empty if every size is its own bucket."""
        if self.plan is None:
            return ()
        boundaries = self.plan.policy.boundaries.get(Stage.VISION, ((),))[0]
        return self.plan.sizes(Stage.VISION) or tuple(boundaries)

    def _per_slot(self, need: int) -> float:
        if self.plan is None:
            return 1.0
        return (self.plan.policy.cost(self.plan.fit(Stage.VISION, (need,))) + self._step) / need

    @cached_property
    def _step(self) -> float:
        """Cost of the rest of a step: that of the cheapest decode launch."""
        if self.plan is None:
            return 0.0
        return min((self.plan.policy.cost(b) for b in self.plan.of(Stage.DECODE)), default=0.0)


def first_fit(needs: Sequence[int], capacity: int) -> list[int]:
    """Returns the indices, in order, of needs that fit into ``capacity`` together; each is taken if it still fits."""
    chosen: list[int] = []
    for i, need in enumerate(needs):
        if need <= capacity:
            chosen.append(i)
            capacity -= need
    return chosen
