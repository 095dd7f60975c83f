"""Counts launches by bucket from the engine's messages, and exports them as Prometheus families.

Describes every planned shape with its state, cost and use, and the device's ledger, as JSON values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trencadis.core.graph_and_bucket_learning_report import OUTCOMES
from trencadis.core.json_types import JsonObject
from trencadis.core.process.engine_messages import BucketState, BucketUse, EngineStats, GraphPlan, LearningReport
from trencadis.server.engine.engine_client_and_request_timing import EngineClient

ANY = "any"
"""Bucket label for a device without buckets, where a label per size would grow without bound."""

OTHER = "other"
"""Label of unplanned sizes after the first ``MOST``: they depend on prompts, so labels would grow without bound."""
MOST = 64

RETIRED = "retired"
"""Label of buckets that a change of shapes has given back, whose counts are added up."""

LABELS = ("model_name", "engine", "stage", "bucket")


@dataclass(slots=True)
class BucketTally:
    """Launches of one bucket; tokens are tokens, slots or rows.

    A hit found its bucket ready: its graph is captured, or the device captures none. ``misses`` counts the others by
    reason (``core.graph_and_bucket_learning_report``); hits and misses sum to the launches.
    """

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    real: int = 0
    padded: int = 0
    seconds: float = 0.0

    def add(self, use: BucketUse) -> None:
        """Adds one launch."""
        if use.miss:
            self.misses[use.miss] += 1
        else:
            self.hits += 1
        self.replays += use.state == "captured"
        self.real += use.real
        self.padded += use.padded
        self.seconds += use.seconds

    def merge(self, other: BucketTally) -> None:
        """Adds the launches of another bucket."""
        self.hits += other.hits
        self.misses.update(other.misses)
        self.replays += other.replays
        self.real += other.real
        self.padded += other.padded
        self.seconds += other.seconds


class BucketMetrics:
    """Tallies by (stage, bucket)."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str], BucketTally] = {}
        self._unplanned: set[tuple[str, str]] = set()
        self._version = 0

    def on_stats(self, stats: EngineStats) -> None:
        """Adds the launches of one message."""
        for use in stats.buckets:
            key = use.stage, use.bucket or ANY
            if not use.planned and use.bucket and key not in self._unplanned:
                key = self._limit_key(key)
            self.tallies.setdefault(key, BucketTally()).add(use)
        if stats.plan is not None and stats.plan.learning is not None:
            if self._version and self._version != stats.plan.learning.version:
                self._retire({b.name for b in stats.plan.buckets})
            self._version = stats.plan.learning.version

    def _retire(self, planned: set[str]) -> None:
        """Adds up the tallies of buckets that are not planned any more."""
        for key in [
            k for k in self.tallies if k[1] not in (*planned, RETIRED, OTHER, ANY) and k not in self._unplanned
        ]:
            self.tallies.setdefault((key[0], RETIRED), BucketTally()).merge(self.tallies.pop(key))

    def _limit_key(self, key: tuple[str, str]) -> tuple[str, str]:
        """Returns the key of a bucket that is not planned and was not used before."""
        if len(self._unplanned) == MOST:
            return key[0], OTHER
        self._unplanned.add(key)
        return key

    def get_tally(self, stage: str, bucket: str) -> BucketTally:
        """The tally of one bucket; zeros if it was never used."""
        return self.tallies.get((stage, bucket), BucketTally())

    def make_families(self, values: Sequence[str]) -> Iterator[Metric]:
        """Yields ``graph_bucket_*`` by bucket, and misses by stage and reason."""
        texts: dict[str, tuple[str, Callable[[BucketTally], int]]] = {
            "graph_bucket_hits": ("launches whose bucket was ready: its graph was replayed", lambda t: t.hits),
            "graph_bucket_real_tokens": ("tokens, slots or rows that were asked for", lambda t: t.real),
            "graph_bucket_padded_tokens": ("tokens, slots or rows that were computed", lambda t: t.padded),
        }
        for name, (text, read) in texts.items():
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for (stage, bucket), tally in list(self.tallies.items()):
                family.add_metric((*values, stage, bucket), read(tally))
            yield family
        misses = CounterMetricFamily(
            "vllm:graph_bucket_misses", "launches without a graph, by reason", labels=(*LABELS[:3], "reason")
        )
        for (stage, reason), count in self.count_misses().items():
            misses.add_metric((*values, stage, reason), count)
        yield misses
        padding = GaugeMetricFamily("vllm:padding_ratio", "padded share of the work since the start", labels=LABELS[:3])
        for stage, (real, padded) in self.get_real_and_padded().items():
            padding.add_metric((*values, stage), 1 - real / padded if padded else 0.0)
        yield padding
        ratio = GaugeMetricFamily(
            "vllm:bucket_padding_ratio", "padded over real work since the start, by stage", labels=LABELS[:3]
        )
        for stage, (real, padded) in self.get_real_and_padded().items():
            ratio.add_metric((*values, stage), padded / real if real else 1.0)
        yield ratio

    def get_real_and_padded(self) -> dict[str, tuple[int, int]]:
        """Returns real and padded tokens, slots or rows by stage."""
        found: dict[str, tuple[int, int]] = {}
        for (stage, _), tally in list(self.tallies.items()):
            real, padded = found.get(stage, (0, 0))
            found[stage] = real + tally.real, padded + tally.padded
        return found

    def count_misses(self) -> Counter[tuple[str, str]]:
        """Returns launches without a graph by (stage, reason)."""
        found: Counter[tuple[str, str]] = Counter()
        for (stage, _), tally in list(self.tallies.items()):
            for reason, count in list(tally.misses.items()):
                found[stage, reason] += count
        return found


def make_graph_families(values: Sequence[str], stats: EngineStats, device: str) -> Iterator[Metric]:
    """Yields compilations, bytes of graphs by pool, and warm-up."""
    labels, g = ("model_name", "engine"), stats.graphs
    for name, text, count in (
        ("lazy_compiles", "planned shapes that were compiled by the launch that needed them", g.lazy_compiles),
        ("recompiles", "compilations that must not happen", g.recompiles),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        counter.add_metric(values, count)
        yield counter
    held = GaugeMetricFamily("vllm:graph_bytes", "bytes of captured graphs", labels=(*labels, "pool"))
    for pool, count in g.bytes.items():
        held.add_metric((*values, pool), count)
    yield held
    captured = GaugeMetricFamily("vllm:graph_capture_seconds", "seconds of captures", labels=(*labels, "stage"))
    for stage, seconds in g.capture_seconds.items():
        captured.add_metric((*values, stage), seconds)
    yield captured
    if g.warming is not None:
        warm = GaugeMetricFamily("vllm:warmup_progress", "share of a warm-up phase", labels=(*labels, "phase"))
        warm.add_metric((*values, g.warming.phase), g.warming.fraction)
        yield warm
    shown = GaugeMetricFamily("vllm:device_info", "what computes", labels=(*labels, "device"))
    shown.add_metric((*values, device), 1)
    yield shown


def make_learning_families(values: Sequence[str], plan: GraphPlan | None) -> Iterator[Metric]:
    """Yields the version of the plan, 0 where nothing is learned, and proposals by outcome."""
    learning = plan.learning if plan is not None and plan.learning is not None else LearningReport(version=0)
    version = GaugeMetricFamily("vllm:bucket_plan_version", "version of the planned shapes", labels=LABELS[:2])
    version.add_metric(values, learning.version)
    yield version
    replans = CounterMetricFamily(
        "vllm:bucket_replans", "proposed shapes by what became of them", labels=(*LABELS[:2], "outcome")
    )
    for outcome in OUTCOMES:
        replans.add_metric((*values, outcome), learning.outcomes.get(outcome, 0))
    yield replans


def describe_learning(learning: LearningReport) -> JsonObject:
    """Describes what an engine has learned: needs by size, the version, the proposal, the last changes."""
    proposal = learning.proposal
    return {
        "mode": learning.mode,
        "version": learning.version,
        "state": learning.state,
        "steps": learning.steps,
        "load_seconds": learning.load_seconds,
        "cells": learning.cells,
        "launches": learning.launches,
        "residuals": learning.residuals,
        "histogram": [cell._asdict() for cell in learning.histogram],
        "proposal": None if proposal is None else proposal._asdict(),
        "changes": [change._asdict() for change in learning.changes],
    }


def describe_all_buckets(engines: Sequence[EngineClient], bucket_metrics: Sequence[BucketMetrics]) -> JsonObject:
    """Describes the shapes of one engine; several engines have an object each, in ``engines``."""
    each = [describe_engine_buckets(engine, metrics) for engine, metrics in zip(engines, bucket_metrics, strict=True)]
    return each[0] if len(each) == 1 else {"engines": each}


def describe_engine_buckets(engine: EngineClient, tallies: BucketMetrics) -> JsonObject:
    """Describes the shapes of one engine."""
    plan, stats = engine.plan, engine.stats
    info = engine.info
    answer: JsonObject = {
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
    if plan is not None and plan.learning is not None:
        answer["learning"] = describe_learning(plan.learning)
    known = {b.name for b in plan.buckets} if plan is not None else set()
    listed = [describe_bucket(b, tallies.get_tally(b.stage, b.name)) for b in plan.buckets] if plan is not None else []
    others = [
        {"stage": stage, "bucket": name, "planned": False, **describe_usage(tally)}
        for (stage, name), tally in list(tallies.tallies.items())
        if name not in known
    ]
    return answer | {"buckets": listed, "unplanned": others}


def describe_plan(plan: GraphPlan) -> JsonObject:
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


def describe_bucket(b: BucketState, tally: BucketTally) -> JsonObject:
    """Describes one planned bucket."""
    failed = {"failed": b.failed} if b.failed else {}
    return {
        "bucket": b.name, "stage": b.stage, "dims": b.dims, "variant": b.variant, "pool": b.pool, "planned": True,
        "state": b.state, "bytes": b.bytes, "measured": b.measured, **failed, **describe_usage(tally),
    }  # fmt: skip


class BucketUsage(TypedDict):
    """Counts of a bucket since the start; ``misses`` by reason."""

    hits: int
    misses: dict[str, int]
    replays: int
    real_tokens: int
    padded_tokens: int
    padding: float
    seconds: float


def describe_usage(t: BucketTally) -> BucketUsage:
    """Returns the counts of a bucket; ``padding`` is the padded share of the computed work."""
    return {
        "hits": t.hits, "misses": dict(t.misses), "replays": t.replays,
        "real_tokens": t.real, "padded_tokens": t.padded,
        "padding": round(1 - t.real / t.padded, 4) if t.padded else 0.0, "seconds": round(t.seconds, 4),
    }  # fmt: skip
