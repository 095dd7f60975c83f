"""Prometheus families of the three caches: prepared images, encoded images, KV blocks of prefixes.

Merges the families of several engines: one family per name, with the samples of all.

``vllm:lora_requests_info``: which adapters requests run with or wait for, as labels, as vLLM names them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trencadis.core.engine_config import EngineConfig
from trencadis.core.process.engine_messages import EngineInfo, EngineStats
from trencadis.multimodal.images.processor_cache import CacheCounters

LABELS = ("model_name", "engine", "cache")
TEXTS = {
    "cache_hits": "hits: images (processor, encoder), tokens (prefix) or requests (state)",
    "cache_misses": "misses, in the same units",
    "cache_evictions": "dropped to make room: images (processor, encoder), blocks (prefix) or snapshots (state)",
    "cache_bytes": "bytes held",
    "cache_capacity_bytes": "most bytes that the cache may hold",
}


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Size and counters of one cache."""

    name: str
    hits: int
    misses: int
    evictions: int
    bytes: int
    capacity: int


def collect_cache_stats(
    stats: EngineStats, info: EngineInfo | None, processor: CacheCounters | None
) -> list[CacheStats]:
    """Returns the caches that exist: ``processor`` (this process), ``encoder`` (rows of the image arena), ``prefix``,
    and ``state`` (snapshots of recurrent state).
    """
    found = []
    if processor is not None:
        p = processor
        found.append(CacheStats("processor", p.hits, p.queries - p.hits, p.evictions, p.bytes, p.max_bytes))
    if info is None:
        return found
    row = info.arena_bytes // info.arena_rows if info.arena_rows else 0
    if row:
        s, missed = stats, stats.mm_queries - stats.mm_hits
        held = s.arena_used * row
        found.append(CacheStats("encoder", s.mm_hits, missed, s.image_evictions, held, info.arena_bytes))
    block = info.kv_bytes // (info.num_blocks + 2)  # two blocks are outside the pool
    hits, missed = stats.prefix_hits, stats.prefix_queries - stats.prefix_hits
    held, most = stats.kv_cached * block, info.num_blocks * block
    found.append(CacheStats("prefix", hits, missed, stats.kv_evictions, held, most))
    if info.snapshot_bytes:
        s, slot = stats, info.snapshot_bytes
        sizes = s.snapshots * slot, info.snapshots * slot
        found.append(CacheStats("state", s.snapshot_hits, s.snapshot_misses, s.snapshot_evictions, *sizes))
    return found


def make_cache_families(values: Sequence[str], caches: Sequence[CacheStats]) -> Iterator[Metric]:
    """Yields one family per figure, labelled by cache."""
    for name, text in TEXTS.items():
        field = name.removeprefix("cache_").removesuffix("_bytes")  # "bytes" itself has no suffix to remove
        kind = GaugeMetricFamily if name.endswith("bytes") else CounterMetricFamily
        family = kind(f"vllm:{name}", text, labels=LABELS)
        for cache in caches:
            family.add_metric((*values, cache.name), getattr(cache, field))
        yield family


class ProcessorCacheCollector(Collector):
    """Collector of the prepared images of one API process of several."""

    def __init__(self, values: Sequence[str], cache: Callable[[], CacheCounters | None]) -> None:
        self._values, self._cache = values, cache

    def collect(self) -> Iterator[Metric]:
        """See ``make_cache_families``."""
        yield from make_cache_families(self._values, collect_cache_stats(EngineStats(), None, self._cache()))


class MergedCollector(Collector):
    """Collector of the merged families of several collectors, since the text format allows each family only once."""

    def __init__(self, parts: Sequence[Collector]) -> None:
        self._collectors = parts

    def collect(self) -> Iterator[Metric]:
        """Yields one family per name, in the order of the first collector that has it."""
        if len(self._collectors) == 1:
            yield from self._collectors[0].collect()
            return
        found: dict[str, Metric] = {}
        for part in self._collectors:
            for family in part.collect():
                if family.name in found:
                    found[family.name].samples.extend(family.samples)
                else:
                    found[family.name] = family
        yield from found.values()


ADAPTER_LABELS = ("model_name", "engine", "max_lora", "waiting_lora_adapters", "running_lora_adapters")


def make_adapter_families(values: Sequence[str], stats: EngineStats, config: EngineConfig) -> Iterator[Metric]:
    """Yields the gauge, whose value is the time in seconds since 1970; none without ``--enable-lora``."""
    if not config.enable_lora:
        return
    gauge = GaugeMetricFamily(
        "vllm:lora_requests_info", "adapters that requests run with or wait for", labels=ADAPTER_LABELS
    )
    names = [",".join(some) for some in (stats.waiting_adapters, stats.running_adapters)]
    gauge.add_metric((*values, str(config.max_loras), *names), time.time())
    yield gauge
