"""Decides whether a proposed plan replaces the present one: gain, certainty, and how often. Pure Python.

A change costs compilations and captures, so it must pay: by needs that the proposal was not chosen with, which also
holds for the choice between its two plans, with an interval of confidence above 0, and without a loss against the plan
of the limits. A gain above ``LEAST_GAIN`` counts at
once; a smaller one once the traffic by which it was judged would have saved as much as the change takes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket
from trencadis.core.graph_and_bucket_learning_report import HELD, PUBLISHED, REVERTED, SMALL, SOON, UNSTEADY, WORSE
from trencadis.core.shapes.plan_from_recorded_needs import expected_cost
from trencadis.core.shapes.shape_need_histogram import NeedHistogram

LEAST_GAIN = 0.03
"""Share of the present plan's seconds, less what the change takes, above which a gain counts at once."""

SLIGHT_GAIN = 0.002
"""Share below which no gain counts."""

HORIZON_SECONDS = 24 * 3600.0
"""Seconds of load over which the making of new shapes must pay."""

DRAWS = 1000
"""Bootstrap draws of the periods."""

MOST_PERIODS = 24
"""Periods of traffic after which a proposal that does not pay is given up."""

UNSTEADY_PERIODS = 12
"""Periods after which a gain must be certain: the longer it takes, the older the needs that the proposal is for."""

CHANGE_SECONDS = 600.0
HOUR_SECONDS = 3600.0
CHANGES_AN_HOUR = 4
HOLD_SECONDS = 24 * 3600.0
"""After a change that did not pay, seconds without another one."""

GUARDED_LAUNCHES = 1000
"""Launches after a change by which it is judged again."""

LEAST_MEASURED = 30
"""Measured launches without which no judgement is made: there is no clock, or it measures too few."""

MOST_OVERRUN = 1.05
"""Measured over predicted seconds above which a change is taken back."""


class PlanCosts(NamedTuple):
    """Seconds that the launches of one period would take under each of four plans."""

    proposed: float
    present: float
    static: float
    recent: float = math.inf
    """Under the plan that was searched with the needs of the last hour alone."""


def price_periods(
    periods: Sequence[NeedHistogram],
    proposed: Plan,
    present: Plan,
    static: Plan,
    recent: Plan,
    time: Callable[[Bucket], float] | None = None,
) -> list[PlanCosts]:
    """Returns the costs of each period that has any needs; ``time``: that of a launch, by default the policy's cost."""
    plans = (proposed, present, static, recent)
    return [PlanCosts(*(expected_cost(plan, period, time) for plan in plans)) for period in periods if period.cells]


def is_recent_better(costs: Sequence[PlanCosts]) -> bool:
    """Returns True if the plan of the last hour's needs costs less than the proposed one."""
    return sum(c.recent for c in costs) < sum(c.proposed for c in costs)


def cross_validate(costs: Sequence[PlanCosts]) -> list[PlanCosts]:
    """Returns the costs with, as the proposed plan of each period, the one of the two that the other periods prefer.

    The better one of two plans is known only after the periods by which both are judged: its costs in the periods that
    have chosen it would promise a gain even where both are as good as the present plan.
    """
    more = [c.proposed - c.recent for c in costs]
    total = sum(more)
    return [c._replace(proposed=c.recent) if total - own > 0 else c for c, own in zip(costs, more, strict=True)]


def has_traffic_shifted(costs: Sequence[PlanCosts]) -> bool:
    """Returns True if the plan of the last hour's needs certainly costs less than the one of all needs."""
    return least_gain([c._replace(proposed=c.recent, present=c.proposed) for c in costs]) > 0


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


def judge(costs: Sequence[PlanCosts], takes: float = 0.0, judged: float = HORIZON_SECONDS) -> str:
    """Returns ``PUBLISHED`` if the proposal may replace the present plan, else why not.

    Args:
        takes: seconds that the change would take.
        judged: seconds of load that ``costs`` are of.
    """
    gain = gain_of(costs)
    if gain <= SLIGHT_GAIN or (gain - takes / HORIZON_SECONDS <= LEAST_GAIN and gain * judged <= takes):
        return SMALL
    if least_gain(costs) <= 0:
        return UNSTEADY
    return PUBLISHED if sum(c.proposed for c in costs) <= sum(c.static for c in costs) else WORSE


def needs_more_evidence(verdict: str, costs: Sequence[PlanCosts]) -> bool:
    """Returns True if a proposal that was refused may pay once it is judged by more traffic."""
    if gain_of(costs) <= SLIGHT_GAIN:
        return False
    if verdict == UNSTEADY:
        return len(costs) < UNSTEADY_PERIODS
    return verdict == SMALL and len(costs) < MOST_PERIODS and least_gain(costs) > 0


@dataclass
class ChangeRate:
    """Bounds how often the plan changes; times in seconds of one clock."""

    changes: list[float] = field(default_factory=list)
    held_until: float = -math.inf

    def refuses(self, now: float) -> str:
        """Returns why no change may begin now; empty: one may."""
        if now < self.held_until:
            return HELD
        recent = [t for t in self.changes if t > now - HOUR_SECONDS]
        if len(recent) >= CHANGES_AN_HOUR or any(t > now - CHANGE_SECONDS for t in recent):
            return SOON
        return ""

    def note_change(self, now: float) -> None:
        """Records a change."""
        self.changes = [*self.changes[-CHANGES_AN_HOUR:], now]

    def hold(self, now: float) -> None:
        """Refuses changes for ``HOLD_SECONDS``."""
        self.held_until = now + HOLD_SECONDS


@dataclass
class ChangeGuard:
    """Compares what launches take after a change with what the cost model predicted before it.

    Args:
        before: the buckets to which the plan goes back if the change does not pay.
        predict: seconds of one launch, as known before the change.
        scale: measured over predicted seconds of the launches before the change.
    """

    before: tuple[Bucket, ...]
    predict: Callable[[Bucket], float]
    scale: float = 1.0
    launches: int = 0
    measured: int = 0
    seconds: float = 0.0
    predicted: float = 0.0

    def add(self, bucket: Bucket, seconds: float) -> None:
        """Adds a measured launch."""
        self.measured += 1
        self.seconds += seconds
        self.predicted += self.scale * self.predict(bucket)

    @property
    def overrun(self) -> float:
        """Measured over predicted seconds."""
        return self.seconds / self.predicted if self.predicted > 0 else 1.0

    def verdict(self) -> str:
        """Returns ``REVERTED`` if the change is to be taken back, ``PUBLISHED`` if it stays, empty if it is open."""
        if self.launches < GUARDED_LAUNCHES or self.measured < LEAST_MEASURED:
            return ""
        return REVERTED if self.overrun > MOST_OVERRUN else PUBLISHED
