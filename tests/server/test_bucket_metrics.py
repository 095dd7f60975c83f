"""Launches by bucket: hits and misses sum to the launches, and a miss says why."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from trencadis.core.engine_stats import MEANINGS, POOL_FULL, SKIP, UNPLANNED
from trencadis.core.process.engine_messages import BucketUse, EngineStats
from trencadis.server.metrics.bucket_metrics import BucketMetrics


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
