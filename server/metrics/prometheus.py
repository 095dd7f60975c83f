"""Prometheus metrics with vLLM's names, and the ten-second log line.

``vllm:cache_config_info``: the KV cache's configuration as labels, as vLLM names them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client import values as storage
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trencadis.core.engine_config import EngineConfig
from trencadis.core.engine_stats import EngineInfo
from trencadis.core.process.engine_messages import EngineStats
from trencadis.multimodal.images.processor_cache import CacheCounters
from trencadis.server.engine.engine_client_and_request_timing import EngineClient, RequestTiming, get_replicas
from trencadis.server.metrics.bucket_metrics import BucketMetrics, make_graph_families, make_learning_families
from trencadis.server.metrics.cache_metrics import (
    MergedCollector,
    ProcessorCacheCollector,
    collect_cache_stats,
    make_adapter_families,
    make_cache_families,
)
from trencadis.server.metrics.process_tenant_and_sleep_collectors import DeprecatedCollector, make_sleep_state
from trencadis.server.metrics.request_record_logs_and_metrics import (
    HttpMetrics,
    StageMetrics,
    format_acceptance,
    make_speculation_families,
)
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission

ABSENT = {
    "is_attention_free": "False", "sliding_window": "None", "prefix_caching_hash_algo": "sha256",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None", "mamba_page_size_padded": "None", "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto", "mamba_cache_mode": "none", "enable_mamba_fine_grained_prefix_cache": "False",
    "replayssm_buffer_len": "None", "use_replayssm": "False", "prefix_cache_retention_interval": "None",
    "kv_cache_dtype_skip_layers": "[]", "skip_page_size_padded": "None", "attn_group_size": "None",
    "calculate_kv_scales": "False", "swap_space": "0",
}  # fmt: skip
"""Labels with the same value on every server of this kind, most of them for features that it does not have."""


def make_cache_labels(config: EngineConfig, info: EngineInfo) -> dict[str, str]:
    """Returns every label with its value; None is written as in Python, as everywhere."""
    tokens = info.num_blocks * info.block_size
    concurrency = tokens / info.max_model_len if info.max_model_len else None
    own = {
        "block_size": info.block_size,
        "user_specified_block_size": config.block_size is not None,
        "cache_dtype": config.kv_cache_dtype,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "num_gpu_blocks": info.num_blocks,
        "num_cpu_blocks": info.host_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "kv_cache_size_tokens": tokens,
        "kv_cache_max_concurrency": None if concurrency is None else round(concurrency, 2),
        "effective_attention_block_size": info.block_size,
        "prefix_match_unit": info.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "kv_offloading_size": config.kv_offloading_size or None,
        "kv_offloading_backend": "native" if config.kv_offloading_size else None,
    }
    return {**ABSENT, **{name: str(value) for name, value in own.items()}}


def make_cache_config_info(values: Sequence[str], config: EngineConfig, info: EngineInfo) -> GaugeMetricFamily:
    """Returns the gauge, whose value is 1. ``values``: of the labels model_name and engine."""
    labels = make_cache_labels(config, info)
    gauge = GaugeMetricFamily(
        "vllm:cache_config_info", "the KV cache's configuration", labels=("model_name", "engine", *labels)
    )
    gauge.add_metric((*values, *labels.values()), 1)
    return gauge


# With PROMETHEUS_MULTIPROC_DIR, which vLLM's manifests set, the library would store each value in a file.
storage.ValueClass = storage.MutexValue
LABELS = ("model_name", "engine")
ENDS = ("stop", "length", "abort", "error", "repetition")
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
        2560)  # fmt: skip
INTER_TOKEN_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
REQUEST_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680)  # fmt: skip
TOKEN_HISTOGRAMS = {
    "request_prompt_tokens": "prompt tokens of a request",
    "request_generation_tokens": "generated tokens of a request",
    "request_max_num_generation_tokens": "tokens of the longest choice of a request",
    "request_params_max_tokens": "max_tokens of a request",
    "request_prefill_kv_computed_tokens": "prompt tokens of a request that no cache held",
}
TIME_HISTOGRAMS = {
    "e2e_request_latency_seconds": "arrival to end",
    "request_queue_time_seconds": "time in the queue",
    "request_inference_time_seconds": "time on the device",
    "request_prefill_time_seconds": "time until the first token, on the device",
    "request_decode_time_seconds": "time after the first token",
}
GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("requests on the device", lambda s: s.running),
    "num_requests_waiting": ("requests in the queue", lambda s: s.waiting),
    "kv_cache_usage_perc": ("share of KV blocks in use, 0 to 1", lambda s: _divide(s.kv_used, s.kv_total)),
    "encoder_cache_usage_perc": ("share of image rows in use, 0 to 1", lambda s: _divide(s.arena_used, s.arena_total)),
    "cpu_threads": ("threads of rank 0 that compute on a CPU now; busy CPUs are left out", lambda s: s.cpu_threads),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": ("tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("tokens found in the prefix cache", lambda s: s.prefix_hits),
    "mm_cache_queries": ("images looked up in the image cache", lambda s: s.mm_queries),
    "mm_cache_hits": ("images found in the image cache", lambda s: s.mm_hits),
    "num_preemptions": ("requests put back into the queue", lambda s: s.preemptions),
    "prompt_tokens": ("tokens of prompts that are done, from a cache or not", lambda s: s.prompt_tokens),
    "prompt_tokens_cached": ("those of them that the prefix cache held", lambda s: s.prompt_cached),
    "generation_tokens": ("tokens generated", lambda s: s.generation_tokens),
    "images_encoded": ("images through the vision tower", lambda s: s.images_encoded),
}


def _zero(stats: EngineStats) -> float:
    """Returns 0 for counters that this server does not have."""
    return 0.0


BY_LABEL: dict[str, tuple[str, str, dict[str, Callable[[EngineStats], float]]]] = {
    "num_requests_waiting_by_reason": (
        "requests in the queue: for free KV blocks, for a grammar or images, or in the fair queue", "reason",
        {"capacity": lambda s: s.waiting - s.deferred, "deferred": lambda s: s.deferred},
    ),
    "prompt_tokens_by_source_total": (
        "tokens of prompts that are done, by where their KV came from", "source",
        {
            "local_compute": lambda s: s.prompt_tokens - s.prompt_cached,
            "local_cache_hit": lambda s: s.prompt_cached,
            "external_kv_transfer": _zero,
        },
    ),
    "prompt_tokens_cached_by_source_total": (
        "prompt tokens that a cache held, by the cache", "source",
        {
            "device": lambda s: max(s.prompt_cached - s.host_hits, 0),
            "host": lambda s: min(s.host_hits, s.prompt_cached),
            **dict.fromkeys(("p2p", "disk", "external_unspecified"), _zero),
        },
    ),
}  # fmt: skip
"""Name -> text, label, and the function of each label value."""


class PrometheusMetrics:
    """The registry, updated from statistics of the engine and from finished requests.

    Args:
        config: the engine's flags, for ``make_cache_config_info``.
        fair_queued: counts requests that wait before they reach an engine; they count as the first engine's.
        hidden: True if deprecated names of vLLM are exported too.
        one_of_several: True for one of several API processes; then the front process has the metrics of the engines.
    """

    def __init__(
        self,
        model: str,
        max_model_len: int,
        engine: EngineClient,
        admission: Admission,
        processor_cache: Callable[[], CacheCounters | None] = lambda: None,
        config: EngineConfig | None = None,
        hidden: bool = False,
        fair_queued: Callable[[], int] = int,
        one_of_several: bool = False,
    ) -> None:
        self.registry, self.model = CollectorRegistry(), model
        engines = get_replicas(engine)
        self._values = [(model, str(i)) for i in range(len(engines))]
        self.bucket_metrics = [BucketMetrics() for _ in engines]
        self._histograms: dict[str, Histogram] = {}
        sizes = tuple(_make_bucket_bounds(max_model_len))
        for table, buckets in ((TOKEN_HISTOGRAMS, sizes), (TIME_HISTOGRAMS, REQUEST_BUCKETS)):
            for name, text in table.items():
                self._make_histogram(name, text, buckets)
        self._make_histogram("time_to_first_token_seconds", "arrival to first token", TTFT_BUCKETS)
        self._make_histogram("inter_token_latency_seconds", "time between tokens", INTER_TOKEN_BUCKETS)
        self._make_histogram(
            "request_time_per_output_token_seconds", "mean time per token after the first", INTER_TOKEN_BUCKETS
        )
        self._make_histogram("iteration_tokens_total", "tokens of a step, of prompts and answers", ITERATION_BUCKETS)
        self._make_histogram("request_params_n", "choices of a request", (1, 2, 5, 10, 20))
        self._make_histogram("request_num_preemptions", "preemptions of a request", (1, 2, 3, 4, 5, 10, 20))
        self._stages = StageMetrics(self.registry, self._values)
        self._success = self._make_counter("request_success", "ended requests", "finished_reason")
        for values in self._values:
            for reason in ENDS:
                self._success.labels(*values, reason)
        self._padding = self._make_counter("padding_tokens", "padded positions of launches", "stage")
        self._images = self._make_counter("image_tokens", "placeholder tokens of images")
        self._media_errors = self._make_counter("media_errors", "images that could not be used", "reason")
        self.http = HttpMetrics(self.registry)
        self.registry.register(_AdmissionCollector(model, admission, one_of_several))
        if one_of_several:
            self.registry.register(ProcessorCacheCollector(self._values[0], processor_cache))
            return
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self.registry)
        config = config or EngineConfig()
        between = self._histograms["inter_token_latency_seconds"]
        every: list[Collector] = []
        for i, (one, values) in enumerate(zip(engines, self._values, strict=True)):
            cache = processor_cache if i == 0 else _no_cache
            every.append(
                _EngineCollector(values, one, self.bucket_metrics[i], cache, config, int if i else fair_queued)
            )
            if hidden:
                every.append(DeprecatedCollector(values, partial(getattr, one, "stats"), between if i == 0 else None))
            one.observers.append(partial(self.on_stats, engine=i))
        self.registry.register(MergedCollector(every))

    def format_text(self) -> bytes:
        """Returns the metrics in the exposition format."""
        return generate_latest(self.registry)

    def on_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Records the lists of an engine's statistics message, which contain only new entries."""
        values = self._values[engine]
        steps = self._histograms["iteration_tokens_total"].labels(*values)
        for tokens in stats.step_tokens:
            steps.observe(tokens)
        for use in stats.buckets:
            self._padding.labels(*values, use.stage).inc(max(0, use.padded - use.real))
            if use.stage == "vision":
                self._stages.record_launch(use, values)
        self.bucket_metrics[engine].on_stats(stats)

    def record_finished(self, timing: RequestTiming) -> None:
        """Records a finished request, however it ended."""
        end = timing.end or time.monotonic()
        streams, values = timing.streams, self._get_values(timing)
        for reason in timing.finish or ["abort"]:
            self._success.labels(*values, reason).inc()
        self._observe(values, "request_prompt_tokens", timing.prompt_tokens)
        self._observe(values, "request_generation_tokens", timing.generated)
        self._observe(values, "request_max_num_generation_tokens", max((s.count for s in streams), default=0))
        self._observe(values, "request_params_max_tokens", timing.max_tokens)
        self._observe(values, "request_prefill_kv_computed_tokens", max(0, timing.prompt_tokens - timing.cached))
        self._observe(values, "request_params_n", timing.n)
        self._observe(values, "e2e_request_latency_seconds", end - timing.start + timing.fair_queue_seconds)
        self._images.labels(*values).inc(timing.image_tokens)
        self._observe_times(timing, values)
        self._stages.record_finished(timing, values)

    def observe_gaps(self, timing: RequestTiming) -> None:
        """Records the gaps between tokens of a request."""
        gaps = self._histograms["inter_token_latency_seconds"].labels(*self._get_values(timing))
        for gap in timing.gaps:
            gaps.observe(gap)

    def _get_values(self, timing: RequestTiming) -> Sequence[str]:
        return self._values[min(timing.engine, len(self._values) - 1)]

    def count_media_error(self, reason: str) -> None:
        """Counts an image or video that could not be used."""
        self._media_errors.labels(*self._values[0], reason).inc()

    def _observe_times(self, timing: RequestTiming, values: Sequence[str]) -> None:
        if timing.first is not None:
            self._observe(
                values, "time_to_first_token_seconds", timing.first - timing.start + timing.fair_queue_seconds
            )
        self.observe_gaps(timing)
        for mean in timing.seconds_per_token():
            self._observe(values, "request_time_per_output_token_seconds", mean)
        for stats in timing.stats:
            self._observe(values, "request_queue_time_seconds", stats.queue + timing.fair_queue_seconds)
            self._observe(values, "request_prefill_time_seconds", stats.prefill)
            self._observe(values, "request_decode_time_seconds", stats.decode)
            self._observe(values, "request_inference_time_seconds", stats.prefill + stats.decode)
            self._observe(values, "request_num_preemptions", stats.preemptions)

    def _observe(self, values: Sequence[str], name: str, value: float) -> None:
        self._histograms[name].labels(*values).observe(value)

    def _make_histogram(self, name: str, text: str, buckets: Sequence[float]) -> None:
        made = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        for values in self._values:
            made.labels(*values)
        self._histograms[name] = made

    def _make_counter(self, name: str, text: str, *extra: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*LABELS, *extra), registry=self.registry)


def _no_cache() -> CacheCounters | None:
    """Returns None: decoded images belong to the API process, and are counted as the first engine's."""
    return None


class _EngineCollector(Collector):
    """Reads the engine's latest counters at each scrape."""

    def __init__(
        self,
        values: Sequence[str],
        engine: EngineClient,
        bucket_metrics: BucketMetrics,
        processor_cache: Callable[[], CacheCounters | None],
        config: EngineConfig,
        fair_queued: Callable[[], int],
    ) -> None:
        self._config, self._fair_queued = config, fair_queued
        self._processor_cache = processor_cache
        self._values = values
        self._bucket_metrics = bucket_metrics
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields one family per counter and gauge."""
        stats = self._engine.stats
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            more = self._fair_queued() if name == "num_requests_waiting" else 0
            gauge.add_metric(self._values, read(stats) + more)
            yield gauge
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._values, read(stats))
            yield counter
        yield from self._make_labelled_families(stats)
        yield from make_speculation_families(self._values, stats)
        yield make_sleep_state(self._values, self._engine.sleep_level)
        ended = CounterMetricFamily("vllm:engine_restarts", "engines that failed and were replaced", labels=LABELS)
        ended.add_metric(self._values, self._engine.restarts)
        yield ended
        yield from self._bucket_metrics.make_families(self._values)
        info = self._engine.info
        if info is not None:
            yield make_cache_config_info(self._values, self._config, info)
        yield from make_adapter_families(self._values, stats, self._config)
        yield from make_graph_families(self._values, stats, info.device if info is not None else "")
        yield from make_learning_families(self._values, self._engine.plan)
        yield from make_cache_families(self._values, collect_cache_stats(stats, info, self._processor_cache()))

    def _make_labelled_families(self, stats: EngineStats) -> Iterator[Metric]:
        """Yields the families of ``BY_LABEL``."""
        for name, (text, label, parts) in BY_LABEL.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"vllm:{name.removesuffix('_total')}", text, labels=(*LABELS, label))
            for value, read in parts.items():
                family.add_metric((*self._values, value), read(stats))
            if label == "reason":
                family.add_metric((*self._values, "turn"), self._fair_queued())
            yield family


class _AdmissionCollector(Collector):
    """Collector of the bounded queue for all engines. ``part``: amounts of one process, without the bounds of all."""

    def __init__(self, model: str, admission: Admission, one_of_several: bool) -> None:
        self._model = model
        self._admission = admission
        self._is_one_of_several = one_of_several

    def collect(self) -> Iterator[Metric]:
        """Yields refusals, held amounts, and the bounds."""
        yield from self._make_held_families()
        refused = CounterMetricFamily("vllm:admission_rejections", "429 answers", labels=("model_name", "reason"))
        for reason, count in self._admission.rejected.items():
            refused.add_metric((self._model, reason), count)
        yield refused

    def _make_held_families(self) -> Iterator[Metric]:
        """Yields the amounts in the bounded queue, and its bounds."""
        names = ("requests", "tokens", "pixels")
        for name, text, values in (
            ("admission_inside", "held by requests inside the server", self._admission.own),
            ("admission_bound", "most that may be held", self._admission.bounds.get_amounts()),
        )[: 1 if self._is_one_of_several else 2]:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name", "unit"))
            for unit, value in zip(names, values, strict=True):
                gauge.add_metric((self._model, unit), value)
            yield gauge


class ThroughputLog:
    """Formats the log line about throughput; tools parse its wording."""

    def __init__(self) -> None:
        self._last = EngineStats()
        self._restarts = 0
        self._at = time.monotonic()

    def format_line(
        self, stats: EngineStats, device: str = "cpu", restarts: int = 0, fair_queued: int = 0
    ) -> str | None:
        """Returns the line for the time since the last call; None if nothing happened.

        Args:
            restarts: number of restarts so far; a new engine counts from zero.
            fair_queued: requests that wait in the fair queue.
        """
        name = "CPU" if device.startswith("cpu") else "GPU"
        now = time.monotonic()
        last, seconds = self._last, max(now - self._at, 1e-6)
        fell = stats.prompt_tokens < last.prompt_tokens or stats.generation_tokens < last.generation_tokens
        if fell or restarts != self._restarts:
            last = EngineStats()
        self._last, self._at, self._restarts = stats, now, restarts
        prompt = stats.prompt_tokens - last.prompt_tokens
        generated = stats.generation_tokens - last.generation_tokens
        if not (prompt or generated or stats.running or stats.waiting or fair_queued):
            return None
        parts = [
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s",
            f"Running: {stats.running} reqs",
            f"Waiting: {stats.waiting + fair_queued} reqs",
            f"{name} KV cache usage: {100 * _divide(stats.kv_used, stats.kv_total):.1f}%",
            f"Prefix cache hit rate: {100 * _divide(stats.prefix_hits, stats.prefix_queries):.1f}%",
        ]
        if stats.mm_queries:
            parts.append(f"MM cache hit rate: {100 * _divide(stats.mm_hits, stats.mm_queries):.1f}%")
        parts += format_acceptance(stats, last)
        return ", ".join(parts)


def make_preemption_warning(before: int, now: int) -> str | None:
    """Returns a warning about preemptions since the last call; None if there were none."""
    if now <= before:
        return None
    return (
        f"{now - before} requests were preempted for lack of KV cache and will be computed again (in all {now}); "
        "a larger --kv-cache-memory-bytes or --gpu-memory-utilization, or a smaller --max-num-seqs avoids it"
    )


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _make_bucket_bounds(top: int) -> Iterator[int]:
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size > top:
                return
            yield factor * size
        size *= 10
