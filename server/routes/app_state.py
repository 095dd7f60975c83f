"""Settings and state of a running API server: what the app, its middleware and its processes use.

The header ``endpoint-load-metrics`` has the load of the engine in the form of ORCA, for balancers that ask for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trencadis import __version__
from trencadis.core.engine_config import EngineConfig
from trencadis.core.host_memory import limited_budget
from trencadis.core.process.engine_messages import EngineStats
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.engine.engine_client_and_request_timing import EngineClient
from trencadis.server.metrics.prometheus import PrometheusMetrics
from trencadis.server.metrics.request_trace_queue import TraceQueue
from trencadis.server.routes.shared_state_of_api_processes import SharedProcessState
from trencadis.server.tenants.fair_queue import TenantFairQueue
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission, Bounds
from trencadis.server.tenants.tenant_registry import TenantRegistry

PIXEL_BYTES = 6
"""Bytes of a resized pixel in this process (``Bounds``)."""
PIXEL_SHARE = 1 / 3
"""Largest share of the memory of this machine or container for pixels of requests, unless a flag bounds them."""
BODY_SHARE = 1 / 12
"""Largest share for bodies of requests."""


@dataclass(frozen=True)
class HttpSettings:
    """The server's flags as ``config``, and settings that come from elsewhere.

    Args:
        model_root: the model as the user named it; its name in the API where ``--served-model-name`` gives none.
        device: as asked for; /metrics and the log name it until the engine is up.
        max_running: requests that run at a time, which the bound of the queue does not count.
        priorities: whether the scheduler heeds them.
        engine: the engine's flags, without secrets.
        shared: what this process has as one of several that answer.
    """

    config: ServerConfig = field(default_factory=ServerConfig)
    model_root: str = ""
    device: str = ""
    max_running: int = 0
    priorities: bool = False
    engine: EngineConfig = field(default_factory=EngineConfig)
    shared: SharedProcessState | None = None

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        return tuple(self.config.served_model_name) or (self.model_root or "model",)

    @cached_property
    def name(self) -> str:
        """The first name, which metrics and answers carry."""
        return self.served_names[0]

    @property
    def bounds(self) -> Bounds:
        """The limits of what may be inside the server at a time."""
        config, usual = self.config, Bounds()
        waiting = config.max_num_queued_reqs
        return Bounds(
            usual.requests if waiting is None else waiting + self.max_running,
            config.max_num_queued_tokens or usual.tokens,
            config.max_num_queued_pixels or limited_budget(usual.pixels * PIXEL_BYTES, PIXEL_SHARE) // PIXEL_BYTES,
            limited_budget(config.max_queued_body_bytes, BODY_SHARE),
        )

    @cached_property
    def fingerprint(self) -> str | None:
        """The ``system_fingerprint``, in the form that ``--fingerprint-mode`` sets."""
        mode, ranks = self.config.fingerprint_mode, self.engine.tensor_parallel_size
        if mode in ("custom", "none"):
            return (self.config.fingerprint_value or None) if mode == "custom" else None
        what = "|".join((__version__, *self.served_names, self.model_root))
        shared = f"-tp{ranks}" if mode == "full" and ranks > 1 else ""
        return f"trencadis-{__version__}{shared}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"


def make_load_header(asked: str, stats: EngineStats, waiting: int) -> Mapping[str, str]:
    """The header with the load as of the engine's last step.

    Args:
        asked: value of the request's ``endpoint-load-metrics-format``, ``TEXT`` or ``JSON``; others get no header.
        waiting: requests that wait.
    """
    values = {
        "kv_cache_usage_perc": stats.kv_used / max(stats.kv_total, 1),
        "num_requests_waiting": float(waiting),
    }
    match asked.strip().upper():
        case "TEXT":
            return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())}
        case "JSON":
            return {LOAD_HEADER: f"JSON {json.dumps({'named_metrics': values})}"}
    return {}


@dataclass(frozen=True, kw_only=True)
class AppState:
    """The parts of a running API server that the app and its processes use; routes have a ``ServingState``."""

    settings: HttpSettings
    engine: EngineClient
    admission: Admission
    metrics: PrometheusMetrics
    created: int
    tenants: TenantRegistry | None = None
    traces: TraceQueue | None = None
    fair_queue: TenantFairQueue | None = None

    @property
    def fair_queued(self) -> int:
        """Number of requests in the fair queues of all API processes, which no engine has yet."""
        own = 0 if self.fair_queue is None else self.fair_queue.waiting
        return own if self.settings.shared is None else self.settings.shared.update_fair_queued(own)

    def make_load_header(self, asked: str) -> Mapping[str, str]:
        """The header that tells a balancer the load, in the form ``asked`` for; none if that is unknown."""
        stats = self.engine.stats
        return make_load_header(asked, stats, stats.waiting + self.fair_queued)
