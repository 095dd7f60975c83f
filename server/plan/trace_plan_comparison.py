"""``trencadis plan --trace``: compares the plan with others on the same traffic. Pure Python.

Traffic becomes the needs of scheduler steps, which are the same for all compared plans: the clock does not depend on
the plan, a step takes a fixed time plus a time per real token. The other plans are powers of two on every axis, and the
exponential plan of vLLM on Gaudi. The padded and real work of all is measured on the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import image_sizes
from trencadis.core.device_shape_policy import SMALLEST, capturable
from trencadis.core.engine.startup_plan import StartupPlan
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.memory.graph_selection import set_cost
from trencadis.core.scheduling.encoder_scheduler import ImagePacker
from trencadis.core.shapes.bucket_options import BucketOptions
from trencadis.core.shapes.bucket_planner import make_plan
from trencadis.core.shapes.launch_costs import Costs, work_of
from trencadis.core.shapes.padding_lower_bound import bound_cost, count_launches
from trencadis.core.shapes.plan_from_recorded_needs import TooFewGraphs, learn_plan
from trencadis.core.shapes.rectangular_launches import RowNeed, split_rows
from trencadis.core.shapes.sample_and_reset_sizes import thin_heads
from trencadis.core.shapes.shape_limits import ShapeLimits, cells
from trencadis.core.shapes.shape_need_histogram import NeedHistogram, count_step, list_needs
from trencadis.multimodal.processor_interface import ImageGeometry

Sizes = Callable[[int, int], ImageGeometry]
"""Returns the geometry of an image of a height and a width."""

STEP_SECONDS = 0.02
TOKEN_SECONDS = 5e-5


@dataclass(frozen=True)
class Traffic:
    """One request: arrival in seconds, tokens of prompt and answer, cached prompt tokens, slots of its images."""

    arrival: float
    prompt: int
    output: int
    cached: int = 0
    images: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepNeeds:
    """Rows and images of one step."""

    rows: tuple[RowNeed, ...]
    images: tuple[int, ...] = ()


@dataclass
class _Running:
    due: int
    context: int
    left: int
    images: deque[int] = field(default_factory=deque)


def replay_steps(traffic: Iterable[Traffic], limits: ShapeLimits) -> Iterator[StepNeeds]:
    """Simulates continuous batching: decoding rows first, then prompts in order of arrival, cut to the token budget."""
    coming = deque(sorted(traffic, key=lambda t: t.arrival))
    running: list[_Running] = []
    now = 0.0
    while coming or running:
        if not running and coming[0].arrival > now:
            now = coming[0].arrival
        while coming and coming[0].arrival <= now and len(running) < limits.max_rows:
            running.append(_enter(coming.popleft(), limits))
        rows, images = _run_step(running, limits)
        yield StepNeeds(tuple(rows), tuple(images))
        now += STEP_SECONDS + TOKEN_SECONDS * sum(n.tokens for n in rows)
        running = [r for r in running if r.left > 0]


def _enter(t: Traffic, limits: ShapeLimits) -> _Running:
    prompt = min(t.prompt, limits.max_model_len - 1)
    cached = min(t.cached, prompt - 1) // limits.block_size * limits.block_size
    output = max(min(t.output, limits.max_model_len - prompt), 1)
    return _Running(prompt - cached, cached, output, deque(t.images))


def _run_step(running: list[_Running], limits: ShapeLimits) -> tuple[list[RowNeed], list[int]]:
    """Returns one step's rows and images; advances the requests."""
    rows: list[RowNeed] = []
    images: list[int] = []
    budget, slots = limits.max_tokens, limits.encoder_slots
    order = sorted(range(len(running)), key=lambda i: (running[i].due > 1, i))
    for i in order:
        r = running[i]
        while r.images and (not images or r.images[0] <= slots):
            slots -= r.images[0]
            images.append(r.images.popleft())
        count = min(r.due, budget)
        if r.images or count < 1:
            continue
        rows.append(RowNeed(len(rows), r.context, count))
        budget -= count
        r.context += count
        r.due -= count
        if not r.due:
            r.left -= 1
            r.due = 1
    return rows, images


REFERENCE_VISION = (1600, 3136, 4096, 6400, 7744, 9216, 12544)


def list_powers(first: int, last: int) -> list[int]:
    """Returns ``first``, twice that and so on until ``last`` is covered."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return sizes


def make_powers_plan(plan: Plan, limits: ShapeLimits) -> Plan:
    """Returns a plan of powers of two on every axis, with every bucket in which a need can occur, independent of the
    device.
    """
    rows = list_powers(1, limits.max_rows)
    tokens = list_powers(64, limits.chunk)
    context = list_powers(1, limits.context_blocks)
    corner = (SMALLEST, SMALLEST)
    found = [Bucket(Stage.FRESH, d) for d in cells((rows, tokens), corner, lambda n: limits.fresh(*n))]
    found += [Bucket(Stage.CONTEXT, d) for d in cells((tokens, context), corner, lambda n: limits.context(*n))]
    most = max(limits.row_blocks, plan.policy.decode_blocks)
    for r in rows:
        found += [Bucket(Stage.DECODE, (r, k)) for k in list_powers(r, min(r * limits.row_blocks, most))]
    found += [Bucket(Stage.VISION, (s,)) for s in list_powers(64, limits.launch_slots)] if limits.image_slots else []
    return Plan(plan.policy, 1, (*found, *_list_head_buckets(rows)), plan.block_size)


def _list_head_buckets(rows: list[int]) -> Iterator[Bucket]:
    for r in rows:
        yield Bucket(Stage.SAMPLE, (r,), "greedy")
        yield Bucket(Stage.SAMPLE, (r,), "full")
        yield Bucket(Stage.RESET, (r,))


def make_exponential_plan(plan: Plan, limits: ShapeLimits, kv_blocks: int) -> tuple[Plan, int]:
    """Returns the exponential plan of the Gaudi extension with prefix caching, and its number of graphs.

    Prompts are (rows, tokens, context blocks of each row). Buckets of several rows with a context count as graphs, but
    this engine never uses them. The extension has no graphs for sampling.
    """
    b, length = limits.block_size, limits.max_model_len
    rows = _make_exponential_range(1, 2, limits.max_rows, _count_steps(limits.max_rows))
    tokens = _make_prompt_lengths(b, length, _count_steps(length))
    prompts = {
        (r, t, k)
        for r in rows
        for t in tokens
        for k in _make_context_blocks((length - t) // b)
        if t <= length and r * (t + k * b) <= limits.max_tokens
    }
    blocks = _make_exponential_range(b, b, kv_blocks, _count_steps(kv_blocks))
    found = [Bucket(Stage.FRESH, (r, t)) for r, t, k in prompts if not k]
    most = plan.policy.context_tokens
    found += [Bucket(Stage.CONTEXT, (t, k)) for r, t, k in prompts if k and r == 1 and t <= most]
    found += [Bucket(Stage.DECODE, (r, k)) for r in rows for k in blocks]
    vision = [Bucket(Stage.VISION, (s,)) for s in REFERENCE_VISION] if limits.image_slots else []
    graphs = len(prompts) + len(rows) * len(blocks) + len(vision)
    return Plan(
        plan.policy, 1, (*sorted(found), *vision, *_list_head_buckets(list_powers(1, limits.max_rows))), b
    ), graphs


def _count_steps(size: int) -> int:
    return math.ceil(math.log2(size)) + 1 if size > 1 else 1


def _make_exponential_range(first: int, step: int, last: int, count: int) -> list[int]:
    """Returns ``count`` geometric values, rounded up to ``step``; a duplicate becomes the nearest free value."""
    if count == 1:
        return [last]
    grid, found = range(first, last + 1, step), set[int]()
    for i in range(count):
        value = first * (last / first) ** (i / (count - 1))
        size = math.ceil(value / step - 1e-9) * step
        if size in found:
            free = [g for g in grid if g not in found]
            if not free:
                break
            size = min(free, key=lambda g, value=value: abs(g - value))  # type: ignore[misc]
        found.add(size)
    return sorted(found)


def _make_prompt_lengths(block: int, length: int, count: int) -> list[int]:
    """Returns prompt lengths: geometric; from a context of 8192 on, the upper half is linear."""
    if length < 8192:
        return _make_exponential_range(block, block, length, count)
    geometric, start = count // 2, length / count
    found = set[int]()
    for i in range(geometric):
        value = block * (start / block) ** (i / (geometric - 1))
        size = math.ceil(value / block) * block
        if size in found:
            size = min((g for g in range(block, length + 1, block) if g not in found), key=lambda g: abs(g - value))
        found.add(size)
    for j in range(1, count - geometric + 1):
        found.add(math.ceil((start + j * (length - start) / (count - geometric)) / block) * block)
    return sorted(found)


def _make_context_blocks(most: int) -> set[int]:
    """Returns context blocks: 0 and geometric values up to ``most``."""
    if most <= 0:
        return {0}
    count = math.ceil(math.log2(most)) + 1
    return {0} | {math.ceil(most ** (i / count)) for i in range(1, count + 1)}


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
    images: list[ImageGeometry] = []
    if sized is not None:
        images += [sized(int(h), int(w)) for w, h in shown]
        for w, h, frames in videos:
            images += [sized(int(h), int(w))] * (-(-_count(frames, "frames") // 2))
    tokens = sum(image.tokens for image in images)
    prompt, output = _count(record["prompt"], "prompt"), _count(record["output"], "output")
    arrival, cached = float(record["arrival"]), int(record.get("cached", 0))
    if not (math.isfinite(arrival) and arrival >= 0 and cached >= 0):
        raise ValueError("arrival and cached must be at least 0")
    slots = tuple(item.slots for image in images for item in image.all_items)
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
    real = sum_real_work(needs, costs)
    real.blocks = 0 if plan.policy.mixed else real.blocks
    for name, (candidate, count, bound, least) in plans.items():
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
            **({} if least is None else {"least_padding": round(max(least / max(real.cost, 1e-9), 1.0), 4)}),
        }
    return {"steps": len(needs), "real": dataclasses.asdict(real), "plans": rows}


class ComparedPlan(NamedTuple):
    """A plan to compare.

    Args:
        bound: expected time and padding of any plan of as many graphs at least, over those of this plan; None: unknown.
        least: the least padded work with which any plan of as many graphs can compute the trace's launches, in units
            of one token's linear operations; a plan that cuts prompts into more launches may need less.
    """

    plan: Plan
    graphs: int
    bound: float | None = None
    least: float | None = None


def _sum_graph_bytes(planned: StartupPlan, plan: Plan) -> int:
    """Returns the predicted bytes of all graphs of a plan."""
    rule = plan.policy.pool_cost
    return set_cost([planned.estimator.price(b, rule) for b in plan.buckets if capturable(plan.policy, b)], rule)


def list_compared_plans(
    needs: Sequence[StepNeeds], planned: StartupPlan, model: ModelConfig
) -> dict[str, ComparedPlan]:
    """Returns the plans to compare: this one, learned ones, and on rectangular devices three made by other rules."""
    plan, limits = planned.plan, planned.limits
    plans = {"this plan": ComparedPlan(plan, len(plan.buckets))}
    learned = record_needs(needs, plan)
    work = work_of(model, limits.block_size)
    launches = count_launches(need for step in needs for need in list_needs(step.rows, step.images, plan))
    for count in LEARNED if learned.cells else ():
        with contextlib.suppress(TooFewGraphs):
            found = learn_plan(plan, learned, count, work=work)
            bound = found.bound / found.static if found.static else None
            thin, least = thin_heads(found.plan, learned), bound_cost(plan, launches, count, work)
            plans[f"learned, {count} graphs"] = ComparedPlan(thin, len(thin.buckets), bound, least)
    if plan.policy.mixed:
        return plans
    linear = make_plan(plan.policy, limits, BucketOptions(strategy="lin"), model)
    plans["linear"] = ComparedPlan(linear, len(linear.buckets))
    two = make_powers_plan(plan, limits)
    plans["powers of two"] = ComparedPlan(two, len(two.buckets))
    blocks = max(planned.ledger.memory_split.blocks, limits.row_blocks)
    plans["reference exponential"] = ComparedPlan(*make_exponential_plan(plan, limits, blocks))
    return plans
