"""Describes every planned shape with its state, cost and use, and the device's ledger, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trencadis.core.process.engine_messages import BucketState, GraphPlan
from trencadis.server.engine.engine_client import EngineClient
from trencadis.server.metrics.bucket_metrics import BucketMetrics, BucketTally


def describe_all_buckets(engines: Sequence[EngineClient], bucket_metrics: Sequence[BucketMetrics]) -> dict[str, Any]:
    """Describes the shapes of one engine; several engines have an object each, in ``engines``."""
    each = [describe_engine_buckets(engine, metrics) for engine, metrics in zip(engines, bucket_metrics, strict=True)]
    return each[0] if len(each) == 1 else {"engines": each}


def describe_engine_buckets(engine: EngineClient, tallies: BucketMetrics) -> dict[str, Any]:
    """Describes the shapes of one engine."""
    plan, stats = engine.plan, engine.stats
    info = engine.info
    answer: dict[str, Any] = {
        "device": info.device if info is not None else None,
        "lazy_compiles": stats.graphs.lazy_compiles,
        "recompiles": stats.graphs.recompiles,
        "graph_breaks": stats.graphs.graph_breaks,
    }
    if stats.graphs.warming is not None:
        warming = stats.graphs.warming
        answer["warmup"] = {
            "phase": warming.phase, "done": warming.done, "total": warming.total,
            "percent": round(100 * warming.fraction, 1), "eta_seconds": round(warming.eta, 1),
        }  # fmt: skip
    if plan is not None:
        answer |= describe_plan(plan)
    known = {b.name for b in plan.buckets} if plan is not None else set()
    listed = [describe_bucket(b, tallies.get_tally(b.stage, b.name)) for b in plan.buckets] if plan is not None else []
    others = [
        {"stage": stage, "bucket": name, "planned": False, **describe_usage(tally)}
        for (stage, name), tally in list(tallies.tallies.items())
        if name not in known
    ]
    return answer | {"buckets": listed, "unplanned": others}


def describe_plan(plan: GraphPlan) -> dict[str, Any]:
    """Describes the ledger and the pools; sizes in bytes."""
    return {
        "mode": plan.warmup,
        "ledger": [{"name": name, "bytes": count} for name, count in plan.ledger],
        "total": plan.total,
        "pools": {
            pool: {"budget": budget, "spent": spent, "not_returned": lost}
            for pool, (budget, spent, lost) in plan.pools.items()
        },
        "advice": plan.advice,
    }


def describe_bucket(b: BucketState, tally: BucketTally) -> dict[str, Any]:
    """Describes one planned bucket."""
    failed = {"failed": b.failed} if b.failed else {}
    return {
        "bucket": b.name, "stage": b.stage, "dims": b.dims, "variant": b.variant, "pool": b.pool, "planned": True,
        "state": b.state, "bytes": b.bytes, "measured": b.measured, **failed, **describe_usage(tally),
    }  # fmt: skip


def describe_usage(t: BucketTally) -> dict[str, Any]:
    """Returns the counts of a bucket; ``padding`` is the padded share of the computed work."""
    return {
        "hits": t.hits, "misses": dict(t.misses), "replays": t.replays,
        "real_tokens": t.real, "padded_tokens": t.padded,
        "padding": round(1 - t.real / t.padded, 4) if t.padded else 0.0, "seconds": round(t.seconds, 4),
    }  # fmt: skip
