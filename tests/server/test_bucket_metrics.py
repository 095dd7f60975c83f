"""Launches by bucket: hits and misses sum to the launches, and a miss says why."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from trencadis.core.engine_stats import GraphCounters
from trencadis.core.errors import Conflict, NotFound
from trencadis.core.graph_and_bucket_learning_report import (
    MEANINGS,
    POOL_FULL,
    SKIP,
    UNPLANNED,
    LearnedChange,
    LearningReport,
    NeedReport,
)
from trencadis.core.process.engine_messages import BucketState, BucketUse, EngineStats, GraphPlan, LearnBuckets
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.metrics.bucket_metrics import (
    RETIRED,
    BucketMetrics,
    describe_all_buckets,
    describe_learning,
    make_learning_families,
)


def test_misses_are_counted_by_stage_and_reason() -> None:
    bucket_metrics = BucketMetrics()
    uses = [
        BucketUse("decode", 1, 2, 0.1, "decode[2x2]", "captured", True, SKIP),
        BucketUse("decode", 1, 2, 0.1, "decode[2x2]", "captured"),
        BucketUse("decode", 3, 4, 0.1, "decode[4x4]", "compiled", True, POOL_FULL),
        BucketUse("vision", 70, 128, 0.1, "vision[128]", "compiled", False, UNPLANNED),
    ]
    bucket_metrics.on_stats(EngineStats(buckets=uses))
    assert bucket_metrics.get_tally("decode", "decode[2x2]").hits == 1
    assert sum(t.hits + t.misses.total() for t in bucket_metrics.tallies.values()) == len(uses)

    class All(Collector):
        def collect(self):  # type: ignore[no-untyped-def]
            return bucket_metrics.make_families(("m", "0"))

    registry = CollectorRegistry()
    registry.register(All())
    text = generate_latest(registry).decode()
    for stage, reason in (("decode", SKIP), ("decode", POOL_FULL), ("vision", UNPLANNED)):
        assert reason in MEANINGS
        labels = f'engine="0",model_name="m",reason="{reason}",stage="{stage}"'
        assert f"vllm:graph_bucket_misses_total{{{labels}}} 1.0" in text


def test_parts_that_are_compiled_with_breaks_are_counted_in_buckets() -> None:
    def engine(breaks: int) -> Any:
        stats = EngineStats(graphs=GraphCounters(graph_breaks=breaks))
        return SimpleNamespace(plan=None, info=None, stats=stats)

    shown: Any = describe_all_buckets([engine(3)], [BucketMetrics()])
    assert shown["graph_breaks"] == 3
    shown = describe_all_buckets([engine(0), engine(4)], [BucketMetrics(), BucketMetrics()])
    assert [one["graph_breaks"] for one in shown["engines"]] == [0, 4]


def test_buckets_that_left_count_as_retired_and_learning_is_shown() -> None:
    """A counter's sum never falls: what a bucket counted before it left moves to one label."""

    def stats(version: int, *names: str, uses: int) -> EngineStats:
        buckets = [BucketState(n, "decode", [2, 2], "", "decode", "captured", 1) for n in names]
        change = LearnedChange(1.0, "published", 1, 2, 1, 1, 0.05)
        learning = LearningReport("on", version, 10, 5.0, 1, [NeedReport("decode", "", [2, 3], 7.0)], None, [change])
        learning.outcomes = {"published": version - 1}
        return EngineStats(
            buckets=[BucketUse("decode", 1, 2, 0.1, n, "captured") for n in names] * uses,
            plan=GraphPlan(1, buckets, learning=learning),
        )

    metrics = BucketMetrics()
    metrics.on_stats(stats(1, "decode[2x2]", "decode[4x4]", uses=3))
    first = stats(2, "decode[2x2]", "decode[3x3]", uses=2)
    metrics.on_stats(first)
    assert {name: t.hits for (_, name), t in metrics.tallies.items()} == {
        "decode[2x2]": 5, "decode[3x3]": 2, RETIRED: 3
    }  # fmt: skip
    families = {
        f.name: f for f in (*metrics.make_families(("m", "0")), *make_learning_families(("m", "0"), first.plan))
    }
    assert families["vllm:bucket_padding_ratio"].samples[0].value == 2.0
    assert families["vllm:bucket_plan_version"].samples[0].value == 2.0
    assert families["vllm:bucket_replans"].samples[0].labels["outcome"] == "published"
    assert first.plan is not None and first.plan.learning is not None
    shown = describe_learning(first.plan.learning)
    assert shown["histogram"] == [{"stage": "decode", "variant": "", "dims": [2, 3], "weight": 7.0}]
    assert shown["changes"][0]["outcome"] == "published" and shown["version"] == 2


def test_a_search_that_runs_refuses_another_and_an_engine_that_records_nothing_all() -> None:
    learning, sent = LearningReport("observe"), list[object]()
    plan = GraphPlan(1, learning=learning)
    client = SimpleNamespace(plan=plan, link=SimpleNamespace(learn_requests=0, write=sent.append))
    client.check_learning = lambda: Supervisor.check_learning(cast(Supervisor, client))

    def ask() -> None:
        asyncio.run(Supervisor.learn_buckets(cast(Supervisor, client)))

    ask()
    with pytest.raises(Conflict):
        ask()
    learning.handled = 1
    ask()
    learning.handled, learning.state = 2, "changing"
    with pytest.raises(Conflict):
        ask()
    plan.learning = None
    with pytest.raises(NotFound):
        ask()
    assert sent == [LearnBuckets(), LearnBuckets()]
