"""``trencadis plan --trace``: compares the plan with others on the same traffic.

Measures the padded and real work of plans on the same steps. Pure Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trencadis.core.buckets import Bucket, Plan, Stage, capturable, padded_tokens
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.registry import image_sizes
from trencadis.core.engine.dry_run import StartupPlan
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.memory.graph_budget import set_cost
from trencadis.core.scheduling.image_packer import ImagePacker
from trencadis.core.shapes.launch_costs import Costs, work_of
from trencadis.core.shapes.learned_plan import TooFewGraphs, learn_plan
from trencadis.core.shapes.rectangular_launches import split_rows
from trencadis.core.shapes.shape_needs import NeedHistogram, count_step, list_needs
from trencadis.multimodal.processor import ImageGeometry
from trencadis.server.plan.baseline_plans import make_exponential_plan, make_powers_plan
from trencadis.server.plan.traffic_replay import Sizes, StepNeeds, Traffic, replay_steps


@dataclass
class LaunchWork:
    """Sums over a trace. ``cost``: linear operations and attended pairs, in units of one token's linear operations."""

    tokens: int = 0
    blocks: int = 0
    slots: int = 0
    cost: float = 0.0
    launches: int = 0
    unplanned: int = 0


def sum_real_work(steps: Iterable[StepNeeds], costs: Costs) -> LaunchWork:
    """Returns the work of the steps without padding."""
    work = LaunchWork()
    for step in steps:
        for n in step.rows:
            blocks = -(-n.context // costs.block_size) if n.tokens > 1 else n.context // costs.block_size + 1
            work.tokens += n.tokens
            work.blocks += blocks
            work.cost += n.tokens + costs.pair * n.tokens * (n.context + (n.tokens + 1) / 2)
        for slots in step.images:
            work.slots += slots
            work.cost += costs.slot * slots + costs.slot_pair * slots**2
    return work


def sum_planned_work(steps: Sequence[StepNeeds], plan: Plan, costs: Costs) -> LaunchWork:
    """Returns the work of the steps in the buckets of ``plan``; the steps are cut by the same rules for every plan."""
    work, known = LaunchWork(), frozenset(plan.buckets)
    for bucket in (*list_text_launches(steps, plan), *list_vision_launches(steps, plan)):
        work.launches += 1
        work.unplanned += bucket not in known
        work.cost += costs(bucket)
        if bucket.stage is Stage.VISION:
            work.slots += bucket.dims[0]
            continue
        work.tokens += padded_tokens(bucket)
        work.blocks += bucket.dims[1] if bucket.stage in (Stage.CONTEXT, Stage.DECODE) and not plan.policy.mixed else 0
    return work


def list_text_launches(steps: Iterable[StepNeeds], plan: Plan) -> Iterator[Bucket]:
    """Yields the launches of the steps' rows."""
    for step in steps:
        if not plan.policy.mixed:
            yield from (cut.bucket for cut in split_rows(step.rows, plan))
        elif step.rows:
            (need,) = list_needs(step.rows, (), plan)
            yield plan.fit(need.stage, need.dims)


def list_vision_launches(steps: Iterable[StepNeeds], plan: Plan) -> Iterator[Bucket]:
    """Yields vision launches: one per step, with the waiting images that the scheduler would choose, until none is
    left.
    """
    packer = ImagePacker(plan, plan.policy.encoder_slots)
    coming = iter(steps)
    waiting: list[int] = []
    while (step := next(coming, None)) is not None or waiting:
        waiting += step.images if step is not None else ()
        chosen = set(packer.choose(waiting))
        if chosen:
            yield plan.fit(Stage.VISION, (sum(waiting[i] for i in chosen),))
            waiting = [slots for i, slots in enumerate(waiting) if i not in chosen]


def read_trace(path: str, sizes: Sizes | None = None) -> list[Traffic]:
    """Reads the requests of a file: one JSON object per line, in order of arrival (``read_request``).

    Args:
        sizes: geometry of their images; None: that of the first family with images.

    Raises:
        StartupError: the file is unreadable, or a line is not a request.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--trace {path}: {getattr(error, 'strerror', None) or 'no UTF-8 text'}.") from None
    found: list[Traffic] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(read_request(json.loads(line), sizes))
                if len(found) > 1 and found[-1].arrival < found[-2].arrival:
                    raise ValueError(f"arrival {found[-1].arrival:g} is before that of the line above")
            except (ValueError, KeyError, TypeError, AttributeError, BadRequest) as error:
                raise StartupError(f"--trace {path}, line {number}: not a request ({error!r}).") from None
    if not found:
        raise StartupError(f"--trace {path} holds no request.")
    return found


def read_request(record: JsonMapping, sizes: Sizes | None = None) -> Traffic:
    """Returns the request that one line of a trace describes.

    ``images`` are [width, height] and ``videos`` [width, height, frames], whose tokens are added to the prompt; each
    two frames run as one image. ``slots`` are those of images whose tokens ``prompt`` counts already, as a server
    records them.
    """
    if unknown := sorted(set(record) - FIELDS):
        raise ValueError(f"unknown field {unknown[0][:40]!r}; known are {', '.join(sorted(FIELDS))}")
    shown, videos = record.get("images", ()), record.get("videos", ())
    sized = (sizes or image_sizes(None, {})) if shown or videos else None
    images: list[ImageGeometry] = [sized(int(h), int(w)) for w, h in shown] if sized else []
    for w, h, frames in videos if sized else ():
        images += [sized(int(h), int(w))] * (-(-_count(frames, "frames") // 2))
    tokens = sum(image.tokens for image in images)
    prompt, output = _count(record["prompt"], "prompt"), _count(record["output"], "output")
    arrival, cached = float(record["arrival"]), int(record.get("cached", 0))
    if not (math.isfinite(arrival) and arrival >= 0 and cached >= 0):
        raise ValueError("arrival and cached must be at least 0")
    slots = tuple(image.item.slots for image in images for _ in range(image.grid[0]))
    slots += tuple(_count(s, "slots") for s in record.get("slots", ()))
    return Traffic(arrival, prompt + tokens, output, cached, slots)


FIELDS = frozenset({"arrival", "prompt", "output", "cached", "images", "videos", "slots"})


def _count(value: Json, name: str) -> int:
    """Returns a whole number from 1 on.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ValueError(f"{name} must be whole numbers from 1 on")
    return value


def replay_needs(traffic: Iterable[Traffic], planned: StartupPlan) -> list[StepNeeds]:
    """Returns what each scheduler step of ``traffic`` needs under the limits of a start-up.

    Raises:
        StartupError: the device takes every size.
    """
    if not planned.plan.buckets:
        raise StartupError("--trace compares planned shapes; this device takes every size.")
    kept = (t if planned.limits.image_slots else dataclasses.replace(t, images=()) for t in traffic)
    return list(replay_steps(kept, planned.limits))


def record_needs(steps: Iterable[StepNeeds], plan: Plan) -> NeedHistogram:
    """Returns the needs of a trace, for ``learn_plan`` and ``--save-profile``."""
    found = NeedHistogram()
    for step in steps:
        count_step(found, step.rows, step.images, plan)
    return found


LEARNED = (40, 80)
"""Numbers of graphs for which ``--trace`` shows the plan that is learned from it."""


def compare_plans(
    needs: Sequence[StepNeeds],
    planned: StartupPlan,
    model: ModelConfig,
    plans: Mapping[str, ComparedPlan] | None = None,
) -> JsonObject:
    """Compares the padded and the real work of the same steps under several plans.

    ``time``: the modelled time of the launches (``Policy.cost``), over that of this plan. Learned plans are chosen by
    this trace, so other traffic costs them more than it shows.
    """
    plan, limits = planned.plan, planned.limits
    costs = work_of(model, limits.block_size)
    if plan.policy.mixed:
        costs = dataclasses.replace(costs, pair=0.0)  # ragged launches do not pad attention, nor do their costs have it
    plans = plans or list_compared_plans(needs, planned, model)
    rows: JsonObject = {}
    own = 0.0
    for name, (candidate, count, bound) in plans.items():
        work = sum_planned_work(needs, candidate, costs)
        time = sum(
            map(plan.policy.cost, (*list_text_launches(needs, candidate), *list_vision_launches(needs, candidate)))
        )
        own = own or time
        seconds = sum(map(planned.estimator.seconds, candidate.buckets))
        rows[name] = {
            "graphs": count,
            **dataclasses.asdict(work),
            "time": round(time / own, 4),
            "warmup_seconds": round(seconds * count / len(candidate.buckets), 1),
            "graph_bytes": _sum_graph_bytes(planned, candidate),
            **({} if bound is None else {"bound": round(bound, 4)}),
        }
    real = sum_real_work(needs, costs)
    real.blocks = 0 if plan.policy.mixed else real.blocks
    return {"steps": len(needs), "real": dataclasses.asdict(real), "plans": rows}


class ComparedPlan(NamedTuple):
    """A plan, its number of graphs, and what any of as many graphs costs at least, over this plan; None: unknown."""

    plan: Plan
    graphs: int
    bound: float | None = None


def _sum_graph_bytes(planned: StartupPlan, plan: Plan) -> int:
    """Returns the predicted bytes of all graphs of a plan."""
    rule = plan.policy.pool_cost
    return set_cost([planned.estimator.price(b, rule) for b in plan.buckets if capturable(plan.policy, b)], rule)


def list_compared_plans(
    needs: Sequence[StepNeeds], planned: StartupPlan, model: ModelConfig
) -> dict[str, ComparedPlan]:
    """Returns the plans to compare: this one, learned ones, and on rectangular devices two plans of others."""
    plan, limits = planned.plan, planned.limits
    plans = {"this plan": ComparedPlan(plan, len(plan.buckets))}
    learned = record_needs(needs, plan)
    for count in LEARNED if learned.cells else ():
        with contextlib.suppress(TooFewGraphs):
            found = learn_plan(plan, learned, count, work=work_of(model, limits.block_size))
            bound = found.bound / found.static if found.static else None
            plans[f"learned, {count} graphs"] = ComparedPlan(found.plan, len(found.plan.buckets), bound)
    if plan.policy.mixed:
        return plans
    two = make_powers_plan(plan, limits)
    plans["powers of two"] = ComparedPlan(two, len(two.buckets))
    blocks = max(planned.ledger.memory_split.blocks, limits.row_blocks)
    plans["reference exponential"] = ComparedPlan(*make_exponential_plan(plan, limits, blocks))
    return plans
