"""Buckets and the plan that chooses them. Pure Python: no torch, no numpy.

``Plan.fit`` is the only place where a bucket is chosen; warm-up iterates the same immutable plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

WINDOW_SLOTS = 64
"""Patch slots of one 112x112-pixel attention window (8 x 8 patches of 14 pixels)."""

DEFAULT_VISION_SLOTS = (256, 576, 1024, 1600, 3136, 4096, 6400, 7744, 9216, 12544)
"""Slots of the default VISION buckets; above them the list grows by 1.5 to the largest need."""


class Stage(IntEnum):
    """What a launch computes. A backend's policy names the stages it has and the axes of each."""

    PREFILL = 1
    DECODE = 2
    FRESH = 3
    CONTEXT = 4
    VISION = 5
    SAMPLE = 6
    RESET = 7


@dataclass(frozen=True, order=True)
class Bucket:
    """One planned shape: the warm-up list, the dictionary key and the metric label are this object."""

    stage: Stage
    dims: tuple[int, ...]
    variant: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.dims))
        return f"{self.stage.name.lower()}[{shape}]{'/' + self.variant if self.variant else ''}"


def _unit_cost(bucket: Bucket) -> float:
    cost = 1.0
    for d in bucket.dims:
        cost *= d
    return cost


@dataclass(frozen=True)
class Policy:
    """A backend's capabilities as data; the planner and the launch former read it, nobody asks predicates.

    Args:
        axes: names of each stage's axes.
        alignment: per stage, what each axis is rounded up to where it has no list.
        boundaries: per stage and axis, ascending sizes to choose from; an empty tuple means alignment alone.
        mixed: prefill and decode rows share one ragged launch.
        depth: steps in flight beyond the one being scheduled.
        block_sizes: KV block sizes the device takes, the default first.
        captures: whether programs are captured as graphs at all.
        cost: a pure polynomial of the bucket; `fit` takes the cheapest.
    """

    axes: Mapping[Stage, tuple[str, ...]]
    alignment: Mapping[Stage, tuple[int, ...]]
    boundaries: Mapping[Stage, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    mixed: bool = True
    depth: int = 0
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    captures: bool = False
    cost: Callable[[Bucket], float] = _unit_cost


def escape(need: int, unit: int = 1) -> int:
    """A size above every boundary, padded to the next multiple of 1/8 of its leading power of two.

    Few shapes can ever arise that way. ``unit`` is what the result must be divisible by.
    """
    step = max(unit, (1 << (need.bit_length() - 1)) // 8)
    step = -(-step // unit) * unit
    return -(-need // step) * step


@dataclass(frozen=True)
class Plan:
    """The shapes of one engine, immutable and versioned. ``fit`` maps needs to the cheapest dominating bucket."""

    policy: Policy
    version: int = 1

    def fit(self, stage: Stage, needs: tuple[int, ...], variant: str = "") -> Bucket:
        """The bucket for ``needs``, one per axis of the stage; capture state plays no part."""
        axes = self.policy.axes[stage]
        if len(needs) != len(axes):
            raise ValueError(f"{stage.name} has axes {axes}, got needs {needs}")
        alignment = self.policy.alignment[stage]
        lists = self.policy.boundaries.get(stage, ((),) * len(axes))
        dims = tuple(_fit_axis(max(n, 1), a, b) for n, a, b in zip(needs, alignment, lists, strict=True))
        return Bucket(stage, dims, variant)

    def planned(self, stage: Stage, needs: tuple[int, ...]) -> bool:
        """False where a need lies above the stage's boundaries, so that an escape shape is used."""
        lists = self.policy.boundaries.get(stage, ())
        return all(not b or n <= b[-1] for n, b in zip(needs, lists, strict=False))


def _fit_axis(need: int, alignment: int, boundaries: tuple[int, ...]) -> int:
    if not boundaries:
        return -(-need // alignment) * alignment
    i = bisect_left(boundaries, need)
    return boundaries[i] if i < len(boundaries) else escape(need, alignment)


def vision_boundaries(largest: int) -> tuple[int, ...]:
    """The default VISION list for a largest need of ``largest`` slots (a geometric tail of ratio 1.5)."""
    sizes = list(DEFAULT_VISION_SLOTS)
    while sizes[-1] < largest:
        sizes.append(-(-sizes[-1] * 3 // 2 // WINDOW_SLOTS) * WINDOW_SLOTS)
    return tuple(sizes)
