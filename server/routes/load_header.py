"""The header ``endpoint-load-metrics``: the load of the engine in the form of ORCA, for balancers that ask for it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trencadis.core.process.engine_messages import EngineStats

ASKED = "endpoint-load-metrics-format"
ANSWERED = "endpoint-load-metrics"


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
            return {ANSWERED: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())}
        case "JSON":
            return {ANSWERED: f"JSON {json.dumps({'named_metrics': values})}"}
    return {}
