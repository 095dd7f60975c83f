"""Prometheus collectors of one process: tenants, traces, processes, log lines, sleep, and deprecated names.

Labels of tenants have names, never keys. CPU time and memory of processes are read from /proc at each scrape. vLLM's
deprecated names are exported with ``--show-hidden-metrics``.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from trencadis.core.engine_stats import EngineStats
from trencadis.core.process.log_setup import find_log_queue
from trencadis.server.tenants.tenant_registry import TenantRegistry

USED = {
    "requests_per_minute": ("tenant_requests", "admitted requests of a tenant"),
    "tokens_per_minute": ("tenant_tokens", "prompt and output tokens of a tenant"),
    "pixels_per_minute": ("tenant_pixels", "pixels of a tenant's media"),
}


class TenantCollector(Collector):
    """Collector of the current values of all tenants."""

    def __init__(self, tenants: TenantRegistry) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Yields one sample per tenant; refusals by limit."""
        accounts = list(self._tenants.accounts.items())
        for field, (name, text) in USED.items():
            used = CounterMetricFamily(f"vllm:{name}", text, labels=("tenant",))
            for tenant, account in accounts:
                used.add_metric((tenant,), account.used[field])
            yield used
        inside = GaugeMetricFamily("vllm:tenant_inside", "choices of a tenant inside the server", labels=("tenant",))
        refused = CounterMetricFamily("vllm:tenant_rejected", "requests beyond a limit", labels=("tenant", "limit"))
        for tenant, account in accounts:
            inside.add_metric((tenant,), account.own)
            for limit, count in account.rejected.items():
                refused.add_metric((tenant, limit), count)
        yield inside
        yield refused


class TraceCounters(Protocol):
    """Protocol of a trace sender's counters."""

    sent: int
    dropped: int

    @property
    def cpu_seconds(self) -> float:
        """CPU time so far."""
        ...


class TraceCollector(Collector):
    """Collector of ``vllm:traces_sent``, ``vllm:traces_dropped`` and ``vllm:traces_cpu_seconds``."""

    def __init__(self, traces: TraceCounters) -> None:
        self._traces = traces

    def collect(self) -> Iterator[Metric]:
        """Yields the current counters."""
        for name, text, value in (
            ("traces_sent", "traces that the collector took, or that the sampler left out", self._traces.sent),
            ("traces_dropped", "traces that no collector took in time", self._traces.dropped),
            ("traces_cpu_seconds", "CPU time of making and sending traces", self._traces.cpu_seconds),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text)
            family.add_metric((), value)
            yield family


API, FRONT, OTHER = "api", "front", "other"
API_MODULE = "trencadis.server.processes.api_worker_process_main"
"""Module in the command line of one of several API processes; the word after the next is its index."""
ROLES = {
    "trencadis.core.process.engine_process": "engine",
    "trencadis.core.executor.rank_process": "rank",
    "trencadis.multimodal.decode_workers.worker_main": "decode_worker",
}
"""Module in the command line of a child process -> its role."""
ALL = (API, *ROLES.values())
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessUse(NamedTuple):
    """One process: its role, CPU seconds (user and system) and resident bytes."""

    role: str
    seconds: float
    resident: int


class ProcessesCollector(Collector):
    """Collector of ``vllm:server_*`` of the process ``root`` and all its descendants.

    Args:
        root: the API process, or the front process of several.
        role: role of ``root``. Several API processes have a role each: ``api-0``.
        proc: folder of the process file system; without it there are no samples.
    """

    def __init__(self, root: int | None = None, proc: Path = Path("/proc"), role: str = API) -> None:
        self._role = role
        self._root = os.getpid() if root is None else root
        self._proc = proc
        self._seen: dict[tuple[int, int], ProcessUse] = {}
        self._ended: dict[str, float] = defaultdict(float)

    def collect(self) -> Iterator[Metric]:
        """Yields one sample per role; seconds of processes that have ended are kept in their role's."""
        now = self.read()
        for key in self._seen.keys() - now.keys():
            self._ended[self._seen[key].role] += self._seen[key].seconds
        self._seen = now
        if not now:
            return
        count = GaugeMetricFamily("vllm:server_processes", "processes of this server", labels=("role",))
        memory = GaugeMetricFamily("vllm:server_resident_memory_bytes", "resident memory", labels=("role",))
        cpu = CounterMetricFamily("vllm:server_cpu_seconds", "user and system CPU time", labels=("role",))
        known = (self._role, *ROLES.values())
        for role in (*known, *sorted({*self._ended, *(use.role for use in now.values())} - {*known})):
            some = [use for use in now.values() if use.role == role]
            count.add_metric((role,), len(some))
            memory.add_metric((role,), sum(use.resident for use in some))
            cpu.add_metric((role,), self._ended[role] + sum(use.seconds for use in some))
        yield from (count, memory, cpu)

    def read(self) -> dict[tuple[int, int], ProcessUse]:
        """Returns every process by its id and start time, since ids are reused."""
        found: dict[tuple[int, int], ProcessUse] = {}
        left = [self._root]
        while left:
            pid = left.pop()
            folder = self._proc / str(pid)
            try:
                # The name in parentheses may contain anything, so fields are counted after it.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                resident = int((folder / "statm").read_text().split()[1]) * _PAGE
                role = self._role if pid == self._root else get_role((folder / "cmdline").read_bytes())
                left += self._list_children(folder)
            except (OSError, IndexError, ValueError):
                continue  # the process has ended meanwhile
            found[pid, int(fields[19])] = ProcessUse(role, (int(fields[11]) + int(fields[12])) / _TICKS, resident)
        return found

    def _list_children(self, folder: Path) -> list[int]:
        """Returns the children of all threads of a process: the kernel lists each under the thread that started it."""
        found: list[int] = []
        for thread in (folder / "task").iterdir():
            try:
                found += map(int, (thread / "children").read_text().split())
            except OSError:
                continue
        return found


def get_role(command: bytes) -> str:
    """Returns the role of a process from its command line in /proc."""
    words = command.decode(errors="replace").split("\0")
    if API_MODULE in words[:-2]:
        return f"{API}-{words[words.index(API_MODULE) + 2]}"
    return next((role for module, role in ROLES.items() if module in words), OTHER)


class LogCollector(Collector):
    """``vllm:log_lines_dropped`` of this process."""

    def collect(self) -> Iterator[Metric]:
        """The counter as it is now."""
        queue = find_log_queue()
        family = CounterMetricFamily("vllm:log_lines_dropped", "lines of log that nothing read in time")
        family.add_metric((), 0 if queue is None else queue.dropped)
        yield family


STATES = ("awake", "weights_offloaded", "discard_all")
"""States by level (0, 1 and 2), with vLLM's names. Here both sleep levels end the engine's process."""
OPERATIONS = ("sleep", "wake")
SLEEP_SECONDS = (.01, .1, 1, 10, 30, 60, 120, 300, 600)  # fmt: skip


class SleepingEngine(Protocol):
    """Protocol of an engine that can sleep."""

    on_operation: list[Callable[[str, float], None]]

    @property
    def sleep_level(self) -> int:
        """0: awake; else the level at which it sleeps, until it has woken up."""
        ...

    @property
    def sleep_operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs, else empty."""
        ...


def make_sleep_state(values: Sequence[str], level: int) -> GaugeMetricFamily:
    """Returns ``vllm:engine_sleep_state``: 1 for the current state."""
    gauge = GaugeMetricFamily(
        "vllm:engine_sleep_state", "1 for the state that holds", labels=("model_name", "engine", "sleep_state")
    )
    for i, state in enumerate(STATES):
        gauge.add_metric((*values, state), int(i == min(level, len(STATES) - 1)))
    return gauge


class SleepCollector(Collector):
    """Collector of ``vllm:sleep_mode_operation*`` of an engine that may sleep; registers itself."""

    def __init__(self, registry: CollectorRegistry, sleeper: SleepingEngine) -> None:
        self._sleeper = sleeper
        self._seconds = Histogram(
            "vllm:sleep_mode_operation_duration_seconds", "seconds of falling asleep and of waking", ("operation",),
            buckets=SLEEP_SECONDS, registry=registry,
        )  # fmt: skip
        for name in OPERATIONS:
            self._seconds.labels(name)
        sleeper.on_operation.append(self.record_operation)
        registry.register(self)

    def record_operation(self, operation: str, seconds: float) -> None:
        """Records an operation."""
        self._seconds.labels(operation).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the number of running operations."""
        gauge = GaugeMetricFamily(
            "vllm:sleep_mode_operations_in_flight", "operations that go on now", labels=("operation",)
        )
        for name in OPERATIONS:
            gauge.add_metric((name,), int(self._sleeper.sleep_operation == name))
        yield gauge


LABELS = ("model_name", "engine")
RATE_WINDOW = 10.0
"""Minimum seconds that the throughput gauges look back."""


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


DEPRECATED_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "gpu_cache_usage_perc": ("now kv_cache_usage_perc", lambda s: _divide(s.kv_used, s.kv_total)),
    "gpu_prefix_cache_hit_rate": (
        "now prefix_cache_hits_total / prefix_cache_queries_total", lambda s: _divide(s.prefix_hits, s.prefix_queries)
    ),
    "cpu_cache_usage_perc": ("always 0: no KV block is swapped", lambda s: 0),
    "cpu_prefix_cache_hit_rate": ("always 0: no KV block is swapped", lambda s: 0),
    "num_requests_swapped": ("always 0: no request is swapped", lambda s: 0),
}  # fmt: skip
DEPRECATED_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "gpu_prefix_cache_queries": ("now prefix_cache_queries_total", lambda s: s.prefix_queries),
    "gpu_prefix_cache_hits": ("now prefix_cache_hits_total", lambda s: s.prefix_hits),
}
DEPRECATED_PACE = "time_per_output_token_seconds"
DEPRECATED_RATES = ("avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s")
DEPRECATED_NAMES = (*DEPRECATED_GAUGES, *DEPRECATED_COUNTERS, *DEPRECATED_RATES, DEPRECATED_PACE)


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
        for name, (text, read) in DEPRECATED_GAUGES.items():
            yield self._make_gauge(name, text, read(stats))
        for name, (text, read) in DEPRECATED_COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._values, read(stats))
            yield counter
        prompt, generated = self._compute_rates(stats)
        yield self._make_gauge(DEPRECATED_RATES[0], "prompt tokens a second", prompt)
        yield self._make_gauge(DEPRECATED_RATES[1], "generated tokens a second", generated)
        for family in () if self._between is None else self._between.collect():
            old = Metric(f"vllm:{DEPRECATED_PACE}", "now inter_token_latency_seconds", "histogram")
            old.samples = [Sample(s.name.replace(family.name, old.name), s.labels, s.value) for s in family.samples]
            yield old

    def _make_gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric(self._values, value)
        return gauge

    def _compute_rates(self, stats: EngineStats) -> tuple[float, float]:
        """Returns tokens per second since the last reading that is ``RATE_WINDOW`` old, or since the first one."""
        now = _CounterReading(self._clock(), stats.prompt_tokens, stats.generation_tokens)
        kept = self._readings
        if kept and now.generated < kept[-1].generated:
            kept.clear()  # a new engine counts from zero
        kept.append(now)
        while len(kept) > 2 and now.at - kept[1].at >= RATE_WINDOW:
            kept.popleft()
        first, seconds = kept[0], now.at - kept[0].at
        if not seconds:
            return 0.0, 0.0
        return (now.prompt - first.prompt) / seconds, (now.generated - first.generated) / seconds
