"""Autoscaling policy: the number of Ray Serve replicas, by the predicted wait of a new request and the KV blocks in
use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

WAIT, KV_USE = "wait_seconds", "kv_use"
"""Names of the values that replicas report (``ServedReplica.record_autoscaling_stats``)."""

MAX_WAIT = 1.0
"""Seconds of wait above which another replica is worth starting."""

MAX_KV_USE = 0.85
"""Fraction of the KV blocks in use above which requests are soon preempted."""

IDLE_LOAD = 0.5
"""Load below which a replica may be removed, if the others can take its share."""

DOWNSCALE_SECONDS = 120.0
"""Seconds of such a load before a replica is removed: it must drain, and its caches are lost."""


def scale(context: Any) -> tuple[int, dict[str, object]]:
    """Computes the number of replicas; for ``autoscaling_config: {policy: {policy_function:
    trencadis.ray_serve.autoscaling_policy:scale}}``.

    Args:
        context: ``ray.serve.config.AutoscalingContext``.

    Returns:
        The number of replicas, and the ``policy_state`` of the next call.
    """
    now = context.current_time or time.time()
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    count = max(context.current_num_replicas, 1)
    load = compute_load(context.aggregated_metrics or {}, count)
    since = (context.policy_state or {}).get("calm_since")
    wanted = count
    if load > 1:
        wanted, since = math.ceil(count * min(load, 2.0)), None
    elif load < IDLE_LOAD and count > 1 and load * count / (count - 1) < 1:
        since = now if since is None else since
        if now - since >= DOWNSCALE_SECONDS:
            wanted, since = count - 1, now
    else:
        since = None
    return max(least, min(wanted, most)), {"calm_since": since}


def compute_load(metrics: Mapping[str, Mapping[Any, float]], count: int) -> float:
    """Returns the load of ``count`` replicas, 1 being the target. Replicas that report nothing yet count as empty."""
    waits, uses = metrics.get(WAIT, {}).values(), metrics.get(KV_USE, {}).values()
    return max(sum(waits) / count / MAX_WAIT, sum(uses) / count / MAX_KV_USE)


class WaitEstimator:
    """Predicts the wait of a new request by Little's law: waiting requests over the rate at which requests begin."""

    SPAN = 10.0
    """Seconds over which the rate is averaged."""

    def __init__(self) -> None:
        self._begun, self._at, self._rate = 0, 0.0, 0.0

    def estimate(self, submitted: int, waiting: int, now: float) -> float:
        """Returns seconds; ``submitted``: number of requests so far, which restarts at 0 with an engine."""
        begun = submitted - waiting
        if self._at and now > self._at and begun >= self._begun:
            share = 1 - math.exp((self._at - now) / self.SPAN)
            self._rate += share * ((begun - self._begun) / (now - self._at) - self._rate)
        self._begun, self._at = begun, now
        if not waiting:
            return 0.0
        return waiting / self._rate if self._rate > 0 else self.SPAN
