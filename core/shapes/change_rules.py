"""Decides whether a proposed plan replaces the present one: gain, certainty, and how often. Pure Python.

A change costs compilations and captures, so it must pay: by needs that the proposal was not chosen with, more than
``LEAST_GAIN`` of the seconds, with an interval of confidence above 0, and no loss against the plan of the limits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.bucket_plan import Plan
from trencadis.core.engine_stats import PUBLISHED, SMALL, SOON, UNSTEADY, WORSE
from trencadis.core.shapes.learned_plan import expected_cost
from trencadis.core.shapes.shape_needs import NeedHistogram

LEAST_GAIN = 0.03
DRAWS = 1000
"""Bootstrap draws of the periods."""

CHANGE_SECONDS = 600.0
HOUR_SECONDS = 3600.0
CHANGES_AN_HOUR = 4


class PlanCosts(NamedTuple):
    """What the needs of one period cost in three plans."""

    proposed: float
    present: float
    static: float


def price_periods(periods: Sequence[NeedHistogram], proposed: Plan, present: Plan, static: Plan) -> list[PlanCosts]:
    """Returns the costs of each period that has any needs."""
    plans = (proposed, present, static)
    return [PlanCosts(*(expected_cost(plan, period) for plan in plans)) for period in periods if period.cells]


def gain_of(costs: Sequence[PlanCosts]) -> float:
    """Returns the share of the present plan's seconds that the proposed one saves."""
    present = sum(c.present for c in costs)
    return 1 - sum(c.proposed for c in costs) / present if present > 0 else 0.0


def least_gain(costs: Sequence[PlanCosts], seed: int = 0) -> float:
    """Returns the lower end of the 95 % interval of the gain, by a bootstrap over the periods."""
    if not costs:
        return 0.0
    rng = random.Random(seed)
    found = sorted(gain_of(rng.choices(costs, k=len(costs))) for _ in range(DRAWS))
    return found[DRAWS // 40]


def judge(costs: Sequence[PlanCosts]) -> str:
    """Returns ``PUBLISHED`` if the proposal may replace the present plan, else why not."""
    gain = gain_of(costs)
    if gain <= LEAST_GAIN:
        return SMALL
    if least_gain(costs) <= 0:
        return UNSTEADY
    return PUBLISHED if sum(c.proposed for c in costs) <= sum(c.static for c in costs) else WORSE


@dataclass
class ChangeRate:
    """Bounds how often the plan changes; times in seconds of one clock."""

    changes: list[float] = field(default_factory=list)

    def refuses(self, now: float) -> str:
        """Returns why no change may begin now; empty: one may."""
        recent = [t for t in self.changes if t > now - HOUR_SECONDS]
        if len(recent) >= CHANGES_AN_HOUR or any(t > now - CHANGE_SECONDS for t in recent):
            return SOON
        return ""

    def note_change(self, now: float) -> None:
        """Records a change."""
        self.changes = [*self.changes[-CHANGES_AN_HOUR:], now]
