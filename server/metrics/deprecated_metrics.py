"""Deprecated vLLM metric names, exported with ``--show-hidden-metrics``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from trencadis.core.engine_stats import EngineStats

LABELS = ("model_name", "engine")
WINDOW = 10.0
"""Minimum seconds that the throughput gauges look back."""


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "gpu_cache_usage_perc": ("now kv_cache_usage_perc", lambda s: _divide(s.kv_used, s.kv_total)),
    "gpu_prefix_cache_hit_rate": (
        "now prefix_cache_hits_total / prefix_cache_queries_total", lambda s: _divide(s.prefix_hits, s.prefix_queries)
    ),
    "cpu_cache_usage_perc": ("always 0: no KV block is swapped", lambda s: 0),
    "cpu_prefix_cache_hit_rate": ("always 0: no KV block is swapped", lambda s: 0),
    "num_requests_swapped": ("always 0: no request is swapped", lambda s: 0),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "gpu_prefix_cache_queries": ("now prefix_cache_queries_total", lambda s: s.prefix_queries),
    "gpu_prefix_cache_hits": ("now prefix_cache_hits_total", lambda s: s.prefix_hits),
}
PACE = "time_per_output_token_seconds"
RATES = ("avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s")
NAMES = (*GAUGES, *COUNTERS, *RATES, PACE)


class _CounterReading(NamedTuple):
    """Counters at a time."""

    at: float
    prompt: int
    generated: int


class DeprecatedCollector(Collector):
    """Collector of old names for the engine's counters, and for the histogram of times between tokens, which all
    engines share.
    """

    def __init__(
        self,
        values: Sequence[str],
        stats: Callable[[], EngineStats],
        between: Histogram | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._values = values
        self._stats = stats
        self._between = between
        self._clock = clock
        self._readings: deque[_CounterReading] = deque()

    def collect(self) -> Iterator[Metric]:
        """Yields one family per name."""
        stats = self._stats()
        for name, (text, read) in GAUGES.items():
            yield self._make_gauge(name, text, read(stats))
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._values, read(stats))
            yield counter
        prompt, generated = self._compute_rates(stats)
        yield self._make_gauge(RATES[0], "prompt tokens a second", prompt)
        yield self._make_gauge(RATES[1], "generated tokens a second", generated)
        for family in () if self._between is None else self._between.collect():
            old = Metric(f"vllm:{PACE}", "now inter_token_latency_seconds", "histogram")
            old.samples = [Sample(s.name.replace(family.name, old.name), s.labels, s.value) for s in family.samples]
            yield old

    def _make_gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric(self._values, value)
        return gauge

    def _compute_rates(self, stats: EngineStats) -> tuple[float, float]:
        """Returns tokens per second since the last reading that is ``WINDOW`` old, or since the first one."""
        now = _CounterReading(self._clock(), stats.prompt_tokens, stats.generation_tokens)
        kept = self._readings
        if kept and now.generated < kept[-1].generated:
            kept.clear()  # a new engine counts from zero
        kept.append(now)
        while len(kept) > 2 and now.at - kept[1].at >= WINDOW:
            kept.popleft()
        first, seconds = kept[0], now.at - kept[0].at
        if not seconds:
            return 0.0, 0.0
        return (now.prompt - first.prompt) / seconds, (now.generated - first.generated) / seconds
