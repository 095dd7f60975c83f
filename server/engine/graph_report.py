"""Formats the plan and the ledger as lines for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trencadis.core.memory.byte_units import gib
from trencadis.core.process.engine_messages import GraphPlan


def format_plan_lines(plan: GraphPlan) -> Iterator[str]:
    """Yields the lines of ledger, pools, buckets by stage and state, and advice."""
    yield f"{'memory':<26} {'':>12} {'':>7}"
    for name, count in plan.ledger:
        yield f"  {name:<26} {gib(count):>12} {100 * count / max(plan.total, 1):6.1f} %"
    yield f"  {'total':<26} {gib(plan.total):>12}  100.0 %"
    yield "graph pools"
    for pool, (budget, spent, lost) in plan.pools.items():
        kept = f", {gib(lost)} not returned" if lost else ""
        yield f"  {pool:<26} {gib(spent):>12} of {gib(budget)}{kept}"
    yield f"planned shapes, warm-up {plan.warmup}"
    counts: Counter[tuple[str, str]] = Counter((b.stage, b.state) for b in plan.buckets)
    for stage in dict.fromkeys(b.stage for b in plan.buckets):
        states = ", ".join(f"{n} {state}" for (s, state), n in sorted(counts.items()) if s == stage)
        yield f"  {stage:<26} {states}"
    for bucket in plan.buckets:
        if bucket.failed:
            yield f"  {bucket.name}: {bucket.failed}"
    yield from plan.advice
