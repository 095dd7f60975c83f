"""Cuts a Step into launches, each naming its bucket. Pure: all ranks run it on the same Step and agree."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.buckets import Bucket, Plan, Stage
from trencadis.core.step import Step

HEAD_ROWS = 64
"""Rows of one SAMPLE launch over prompt_logprobs: bounds the logits that exist at a time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One bucket and the indices of what runs in it: rows of the Step, or its images, or its resets."""

    bucket: Bucket
    items: tuple[int, ...]


def split(step: Step, plan: Plan) -> tuple[Launch, ...]:
    """Launches of ``step`` in device order: RESET, VISION, text. SAMPLE follows by ``sample_bucket``."""
    launches: list[Launch] = []
    if step.resets:
        launches.append(Launch(plan.fit(Stage.RESET, (len(step.resets),)), tuple(range(len(step.resets)))))
    if step.images:
        slots = sum(i.slots for i in step.images)
        launches.append(Launch(plan.fit(Stage.VISION, (slots,)), tuple(range(len(step.images)))))
    if step.rows:
        launches.append(Launch(_text(step, plan), tuple(range(len(step.rows)))))
    return tuple(launches)


def _text(step: Step, plan: Plan) -> Bucket:
    """One ragged launch for all rows, prefill and decode mixed."""
    rows = len(step.rows)
    if step.tokens == rows:
        return plan.fit(Stage.DECODE, (rows,))
    return plan.fit(Stage.PREFILL, (step.tokens, rows))


def sample_bucket(rows: int, full: bool, plan: Plan) -> Bucket:
    """The SAMPLE bucket of ``rows`` rows; ``full`` where any of them asks for more than the argmax."""
    return plan.fit(Stage.SAMPLE, (rows,), "full" if full else "greedy")
