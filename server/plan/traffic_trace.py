"""``trencadis plan --trace``: compares the plan with others on the same traffic."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.errors import BadRequest, StartupError
from trencadis.core.models.registry import image_sizes
from trencadis.core.shapes.launch_costs import work_of
from trencadis.core.startup.dry_run import StartupPlan
from trencadis.multimodal.processor import ImageGeometry
from trencadis.server.plan.baseline_plans import make_exponential_plan, make_powers_plan
from trencadis.server.plan.plan_comparison import sum_planned_work, sum_real_work
from trencadis.server.plan.traffic_replay import Sizes, StepNeeds, Traffic, replay_steps


def read_trace(path: str, sizes: Sizes | None = None) -> list[Traffic]:
    """Reads the requests of a file: one JSON object per line with arrival, prompt, output, and optionally cached and
    images.

    Args:
        sizes: geometry of their images; None: that of the first family with images.

    Raises:
        StartupError: the file is unreadable, or a line is not a request.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--trace {path}: {getattr(error, 'strerror', None) or 'no UTF-8 text'}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(read_request(json.loads(line), sizes))
            except (ValueError, KeyError, TypeError, AttributeError, BadRequest) as error:
                raise StartupError(f"--trace {path}, line {number}: not a request ({error!r}).") from None
    if not found:
        raise StartupError(f"--trace {path} holds no request.")
    return found


def read_request(record: Mapping[str, Any], sizes: Sizes | None = None) -> Traffic:
    """Returns the request that one line of a trace describes; ``images`` are [width, height], whose tokens are added
    to the prompt.
    """
    shown = record.get("images", ())
    sized = (sizes or image_sizes(None, {})) if shown else None
    images: list[ImageGeometry] = [sized(int(h), int(w)) for w, h in shown] if sized else []
    tokens = sum(image.tokens for image in images)
    prompt, output = int(record["prompt"]), int(record["output"])
    if prompt < 1 or output < 1:
        raise ValueError("prompt and output must be at least 1")
    slots = tuple(image.item.slots for image in images for _ in range(image.grid[0]))
    return Traffic(float(record["arrival"]), prompt + tokens, output, int(record.get("cached", 0)), slots)


def replay_needs(traffic: Iterable[Traffic], planned: StartupPlan) -> list[StepNeeds]:
    """Yields what each scheduler step of ``traffic`` needs under the limits of a start-up.

    Raises:
        StartupError: the device's launches are not rectangles.
    """
    if planned.plan.policy.mixed:
        raise StartupError("--trace compares plans of rectangular launches; this device runs ragged ones.")
    kept = (t if planned.limits.image_slots else dataclasses.replace(t, images=()) for t in traffic)
    return list(replay_steps(kept, planned.limits))


def compare_plans(needs: Sequence[StepNeeds], planned: StartupPlan, model: ModelConfig) -> dict[str, Any]:
    """Compares the padded and the real work of the same steps under three plans."""
    plan, limits = planned.plan, planned.limits
    costs = work_of(model, limits.block_size)
    kv_blocks = max(planned.ledger.memory_split.blocks, limits.row_blocks)
    reference, graphs = make_exponential_plan(plan, limits, kv_blocks)
    two = make_powers_plan(plan, limits)
    plans = {"this plan": (plan, len(plan.buckets)), "powers of two": (two, len(two.buckets)),
             "reference exponential": (reference, graphs)}  # fmt: skip
    rows = {}
    for name, (candidate, count) in plans.items():
        rows[name] = {"graphs": count, **dataclasses.asdict(sum_planned_work(needs, candidate, costs))}
    return {"steps": len(needs), "real": dataclasses.asdict(sum_real_work(needs, costs)), "plans": rows}
