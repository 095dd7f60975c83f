"""When a proposed plan replaces the present one: certain gains, small ones, shifted traffic, and how often."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trencadis.core import graph_and_bucket_learning_report
from trencadis.core.shapes.plan_change_rules import (
    ChangeRate,
    PlanCosts,
    cross_validate,
    gain_of,
    has_traffic_shifted,
    is_recent_better,
    judge,
    needs_more_evidence,
)
from trencadis.core.shapes.shape_need_recorder import PERIODS


def take_recent(costs: list[PlanCosts]) -> list[PlanCosts]:
    """The costs with the plan of the last hour's needs as the proposed one."""
    return [c._replace(proposed=c.recent) for c in costs]


def test_a_change_needs_a_certain_gain() -> None:
    def costs(*gains: float) -> list[PlanCosts]:
        return [PlanCosts(100 - 100 * g, 100, 110) for g in gains]

    assert judge(costs(0.05, 0.06, 0.05, 0.07)) == graph_and_bucket_learning_report.PUBLISHED
    assert judge(costs(0.001, 0.002, 0.001, 0.002)) == graph_and_bucket_learning_report.SMALL
    assert judge(costs(0.9, -0.5, -0.3, 0.1)) == graph_and_bucket_learning_report.UNSTEADY
    assert judge([PlanCosts(90, 100, 80)] * 4) == graph_and_bucket_learning_report.WORSE
    assert judge([]) == graph_and_bucket_learning_report.SMALL


@pytest.mark.parametrize(
    ("gain", "takes", "hours", "published"),
    [
        (0.04, 600.0, 0.5, True), (0.04, 1200.0, 0.5, False),  # more than 3 % of a day, or not, less the change
        (0.02, 30.0, 0.5, True), (0.02, 60.0, 0.5, False), (0.02, 60.0, 1.0, True),  # 36 seconds saved in half an hour
        (0.001, 0.0, 2.0, False),
    ],
)  # fmt: skip
def test_a_slight_gain_counts_once_it_has_paid_for_the_change(
    gain: float, takes: float, hours: float, published: bool
) -> None:
    costs = [PlanCosts(100 - 100 * gain, 100, 110)] * round(12 * hours)
    verdict = judge(costs, takes, 3600 * hours)
    assert verdict == (
        graph_and_bucket_learning_report.PUBLISHED if published else graph_and_bucket_learning_report.SMALL
    )
    assert needs_more_evidence(verdict, costs) == (not published and gain > 0.01)
    assert not needs_more_evidence(verdict, costs * 12)


def test_a_shift_of_the_traffic_is_seen_by_what_plans_cost() -> None:
    """Those of all needs and of the last hour's, by the same traffic; then what is older is forgotten."""
    assert not is_recent_better([PlanCosts(95, 100, 100)]), "the plan of the last hour was not searched"
    chance = [PlanCosts(100, 100, 100, recent) for recent in (90, 108, 91, 107)]
    assert is_recent_better(chance) and not has_traffic_shifted(chance)
    shifted = [PlanCosts(100, 100, 100, recent) for recent in (90, 92, 91, 97)]
    assert has_traffic_shifted(shifted) and gain_of(cross_validate(shifted)) == pytest.approx(0.075)


def test_the_better_of_two_plans_is_judged_by_periods_that_did_not_choose_it() -> None:
    """Two plans cost as much as the present one but for chance: the better of them must show no gain on average."""
    rng, gains = random.Random(8), list[tuple[float, float]]()
    for _ in range(1000):
        costs = [PlanCosts(rng.gauss(100, 6), 100, 110, rng.gauss(100, 6)) for _ in range(PERIODS)]
        lucky = take_recent(costs) if is_recent_better(costs) else costs
        gains.append((gain_of(lucky), gain_of(cross_validate(costs))))
    means = np.mean(gains, axis=0)
    assert means[0] > 0.01 and abs(means[1]) < 0.002


def test_a_plan_that_is_always_the_better_one_is_judged_by_all_periods() -> None:
    better = [PlanCosts(100, 100, 110, recent) for recent in (90, 95, 91, 97, 92, 96)]
    assert cross_validate(better) == take_recent(better)
    assert cross_validate(better[:1]) == better[:1], "no other period chooses"
    unsearched = [PlanCosts(95, 100, 110)] * PERIODS
    assert cross_validate(unsearched) == unsearched


def test_changes_are_rare() -> None:
    rate, begun = ChangeRate(), list[float]()
    for minute in range(0, 180):
        if not rate.refuses(minute * 60.0):
            begun.append(minute)
            rate.note_change(minute * 60.0)
    assert begun[:5] == [0, 10, 20, 30, 60] and len(begun) == 12
