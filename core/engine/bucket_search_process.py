"""Searches plans and prices proposals in a process of its own, so that no step of an engine waits for them.

A task and its answer are JSON on the child's standard input and output; the child ends after one task, and after
``PATIENCE`` seconds in any case. It imports numpy, but not torch, and runs at a lower priority (``nice``).
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.device_shape_policy import Policy
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.process.child_process_environment_and_exit import environment
from trencadis.core.shapes.launch_costs import Costs
from trencadis.core.shapes.measured_launch_times import (
    BucketTimes,
    Cost,
    LaunchTimes,
    MeasuredCosts,
    Residual,
    describe_cost,
    fit_bytes,
    parse_cost,
)
from trencadis.core.shapes.plan_change_rules import PlanCosts, price_periods
from trencadis.core.shapes.plan_from_recorded_needs import (
    GraphMemoryLimits,
    LearnedPlan,
    TooFewGraphs,
    learn_plan,
)
from trencadis.core.shapes.shape_need_histogram import NeedCell, NeedHistogram

PATIENCE = 120.0
"""Seconds after which a search is given up."""

NICE = 10

HEDGE = 0.1
"""``hedge`` of ``learn_plan`` for plans that change while serving."""

PRICED = ("proposed", "present", "static", "recent")
"""Plans of a ``PriceTask``."""

Cells = Sequence[NeedCell]


class SearchFailed(Exception):
    """A task has no answer; the message says why."""


@dataclass(frozen=True)
class LearnTask:
    """A search for the plan of at most ``most`` graphs that suits ``needs``; see ``learn_plan``.

    Args:
        time: the policy's cost of a launch, from which the seconds of launches are learned.
        present: buckets that need not be made.
        charges: by stage, the share of the device's time that making one more bucket costs.
        launches: number of launches that have been measured.
        times: their seconds.
        bytes: known bytes of graphs.
        pools: stages that share a pool, and the bytes that it has for their graphs.
        recent: the needs of the last hour, for which a plan is searched as well.
    """

    static: Plan
    needs: Cells
    most: int
    time: Costs
    unchanged: tuple[Stage, ...] = ()
    present: tuple[Bucket, ...] = ()
    charges: dict[Stage, float] = field(default_factory=dict)
    launches: int = 0
    times: Sequence[BucketTimes] = ()
    bytes: Mapping[Bucket, int] = field(default_factory=dict)
    pools: Sequence[tuple[frozenset[Stage], float]] = ()
    recent: Cells = ()


@dataclass(frozen=True)
class PriceTask:
    """Task: compute the cost of each period's needs under the proposed, the present and the static plan.

    Args:
        recent: the plan that was chosen by the needs of the last hour.
    """

    periods: Sequence[Cells]
    proposed: Plan
    present: Plan
    static: Plan
    recent: Plan
    time: Cost


@dataclass(frozen=True)
class FoundBuckets:
    """Buckets that a search has found; otherwise as in ``LearnedPlan``.

    Args:
        time: the seconds of launches by which they were chosen; None: by the policy's cost.
        residuals: relative errors of these seconds.
        recent: the buckets that the needs of the last hour alone ask for; empty: not searched.
    """

    buckets: tuple[Bucket, ...]
    graphs: int
    cost: float
    bound: float
    static: float
    time: MeasuredCosts | None = None
    residuals: dict[Stage, Residual] = field(default_factory=dict)
    recent: tuple[Bucket, ...] = ()


Task = LearnTask | PriceTask
Answer = FoundBuckets | list[PlanCosts]


def solve_in_child(task: Task) -> Answer:
    """Runs a task in a child process and waits for it.

    Raises:
        SearchFailed: it has no answer.
    """
    command = [sys.executable, "-P", "-m", "trencadis.core.engine.bucket_search_process"]
    process = subprocess.Popen(
        command, env=environment(os.environ, 1, True), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            out, errors = process.communicate(json.dumps(describe_task(task)).encode(), PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SearchFailed(f"the search took longer than {PATIENCE:g} s") from None
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise SearchFailed(f"the process of the search ended with code {process.returncode}: {last[:200]}")
    return parse_answer(json.loads(out))


def solve(task: Task) -> Answer:
    """Runs a task in this process.

    Raises:
        SearchFailed: it has no answer.
    """
    if isinstance(task, PriceTask):
        periods = [_histogram(cells) for cells in task.periods]
        return price_periods(periods, task.proposed, task.present, task.static, task.recent, task.time)
    if not task.needs:
        raise SearchFailed("nothing has been recorded")
    times = LaunchTimes(task.time).restore(task.launches, task.times)
    measured = times.fit()
    memory = GraphMemoryLimits(fit_bytes(task.bytes), tuple(task.pools))

    def learn(needs: Cells) -> LearnedPlan:
        return learn_plan(
            task.static, _histogram(needs), task.most, task.unchanged, None, measured or task.time, task.charges,
            task.present, memory, HEDGE,
        )  # fmt: skip

    try:
        found = learn(task.needs)
        recent = learn(task.recent).plan.buckets if task.recent else ()
    except TooFewGraphs as error:
        raise SearchFailed(f"--max-graphs {task.most}: these limits need at least {error.least}") from None
    residuals = {} if measured is None else times.residuals(measured)
    figures = found.graphs, found.cost, found.bound, found.static
    return FoundBuckets(found.plan.buckets, *figures, measured, residuals, recent)


def _histogram(cells: Cells) -> NeedHistogram:
    made = NeedHistogram()
    for (stage, variant), dims, weight in cells:
        made.add(stage, dims, weight, variant)
    return made


# JSON


def describe_task(task: Task) -> JsonObject:
    """Returns a task as JSON."""
    if isinstance(task, PriceTask):
        plans = {name: _describe_plan(getattr(task, name)) for name in PRICED}
        return {
            "periods": [_describe_cells(cells) for cells in task.periods],
            "time": describe_cost(task.time),
            **plans,
        }
    return {
        "static": _describe_plan(task.static),
        "needs": _describe_cells(task.needs),
        "most": task.most,
        "time": describe_cost(task.time),
        "unchanged": [stage.name for stage in task.unchanged],
        "present": _describe_buckets(task.present),
        "launches": task.launches,
        "times": [[*_describe_buckets([bucket]), seconds] for bucket, seconds in task.times],
        "bytes": [[*_describe_buckets([bucket]), count] for bucket, count in task.bytes.items()],
        "pools": [[sorted(stage.name for stage in stages), limit] for stages, limit in task.pools],
        "charges": {stage.name: share for stage, share in task.charges.items()},
        "recent": _describe_cells(task.recent),
    }


def parse_task(record: JsonMapping) -> Task:
    """Returns the task that ``describe_task`` has described."""
    time = parse_cost(record["time"])
    if "periods" in record:
        periods = [_parse_cells(cells) for cells in record["periods"]]
        proposed, present, static, recent = (_parse_plan(record[name]) for name in PRICED)
        return PriceTask(periods, proposed, present, static, recent, time)
    assert isinstance(time, Costs)
    return LearnTask(
        _parse_plan(record["static"]),
        _parse_cells(record["needs"]),
        record["most"],
        time,
        tuple(Stage[name] for name in record["unchanged"]),
        _parse_buckets(record["present"]),
        {Stage[name]: share for name, share in record["charges"].items()},
        record["launches"],
        [BucketTimes(_parse_buckets([bucket])[0], seconds) for bucket, seconds in record["times"]],
        {_parse_buckets([bucket])[0]: count for bucket, count in record["bytes"]},
        [(frozenset(Stage[name] for name in stages), limit) for stages, limit in record["pools"]],
        _parse_cells(record["recent"]),
    )


def _describe_plan(plan: Plan) -> JsonObject:
    """Returns what a search reads of a plan; its policy's cost is part of the task."""
    policy = plan.policy
    return {
        "buckets": _describe_buckets(plan.buckets),
        "block_size": plan.block_size,
        "mixed": policy.mixed,
        "axes": {stage.name: axes for stage, axes in policy.axes.items()},
        "alignment": {stage.name: units for stage, units in policy.alignment.items()},
    }


def _parse_plan(record: JsonMapping) -> Plan:
    axes, units = ({Stage[n]: tuple(v) for n, v in record[k].items()} for k in ("axes", "alignment"))
    return Plan(Policy(axes, units, mixed=record["mixed"]), 1, _parse_buckets(record["buckets"]), record["block_size"])


def _describe_buckets(buckets: Sequence[Bucket]) -> Json:
    return [[b.stage.name, b.dims, b.variant] for b in buckets]


def _parse_buckets(records: Json) -> tuple[Bucket, ...]:
    return tuple(Bucket(Stage[stage], tuple(dims), variant) for stage, dims, variant in records)


def _describe_cells(cells: Cells) -> Json:
    return [[stage.name, variant, dims, weight] for (stage, variant), dims, weight in cells]


def _parse_cells(records: Json) -> list[NeedCell]:
    return [NeedCell((Stage[stage], variant), tuple(dims), weight) for stage, variant, dims, weight in records]


def describe_answer(answer: Answer) -> JsonObject:
    """Returns an answer as JSON."""
    if isinstance(answer, list):
        return {"costs": answer}
    figures = {"graphs": answer.graphs, "cost": answer.cost, "bound": answer.bound, "static": answer.static}
    residuals = {stage.name: found for stage, found in answer.residuals.items()}
    time = None if answer.time is None else describe_cost(answer.time)
    recent = {"recent": _describe_buckets(answer.recent)}
    return {"buckets": _describe_buckets(answer.buckets), **figures, "time": time, "residuals": residuals, **recent}


def parse_answer(record: JsonMapping) -> Answer:
    """Returns the answer that ``describe_answer`` has described.

    Raises:
        SearchFailed: there is none; the record says why.
    """
    if "failed" in record:
        raise SearchFailed(record["failed"])
    if "costs" in record:
        return [PlanCosts(*costs) for costs in record["costs"]]
    time = None if record["time"] is None else parse_cost(record["time"])
    assert not isinstance(time, Costs)
    residuals = {Stage[name]: Residual(*found) for name, found in record["residuals"].items()}
    figures = record["graphs"], record["cost"], record["bound"], record["static"]
    buckets, recent = (_parse_buckets(record[name]) for name in ("buckets", "recent"))
    return FoundBuckets(buckets, *figures, time, residuals, recent)


def main() -> None:
    """Runs the task on standard input and writes its answer to standard output."""
    os.nice(NICE)
    signal.alarm(math.ceil(PATIENCE))  # its parent may have ended
    try:
        answer = describe_answer(solve(parse_task(json.load(sys.stdin))))
    except SearchFailed as error:
        answer = {"failed": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
