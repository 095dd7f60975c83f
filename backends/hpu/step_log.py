"""``VLLM_HPU_LOG_STEP_GRAPH_COMPILATION`` and ``..._CPU_FALLBACKS``: what a launch compiled or sent to the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from trencadis.core.envs import get_bool

log = logging.getLogger("trencadis.engine")

KINDS = {
    "graph_compilation": ("VLLM_HPU_STEP_GRAPH_COMPILATION", "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION"),
    "cpu_fallback": ("VLLM_HPU_STEP_CPU_FALLBACK", "VLLM_HPU_LOG_STEP_CPU_FALLBACKS"),
}
"""Metric of the plug-in -> (start of a log line, variable that enables it)."""


@dataclass
class OpenMetric:
    """One metric that is open for the life of the process, and its last values."""

    word: str
    metric: Any
    always: bool
    scope: AbstractContextManager[Any]
    before: tuple[tuple[str, Any], ...]


class StepLog:
    """Compares the plug-in's counters around each launch.

    ``begin`` is called when a launch's inputs are filled, ``end`` when its results are fetched; whatever was counted in
    between belongs to that launch. Without the variables nothing is opened or read.

    Args:
        metrics: ``metric_localcontext`` of the plug-in.
    """

    def __init__(self, environ: Mapping[str, str], metrics: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._launch = ""
        self._counted: list[OpenMetric] = []
        for name, (word, variable) in KINDS.items():
            always = get_bool(f"{variable}_ALL", environ)
            if always or get_bool(variable, environ):
                scope = metrics(name)
                metric = scope.__enter__()
                self._counted.append(OpenMetric(word, metric, always, scope, _stats(metric)))

    def begin(self, launch: str) -> None:
        """Starts counting for a launch; logs the launch before it, which has run."""
        if self._counted:
            self.end()
            self._launch = launch
            for one in self._counted:  # what warm-up compiled since then belongs to no launch
                one.before = _stats(one.metric)

    def end(self) -> None:
        """Logs what the last launch counted."""
        if not self._launch:
            return
        for one in self._counted:
            now = _stats(one.metric)
            events = now[0][1] - one.before[0][1]
            if events or one.always:
                log.warning("%s: %s, events %d, totals %s", one.word, self._launch, events, dict(now))
            one.before = now
        self._launch = ""


def _stats(metric: Any) -> tuple[tuple[str, Any], ...]:
    """Returns (name, value) pairs; the first is the number of events."""
    return tuple((name, dict(value) if isinstance(value, dict) else value) for name, value in metric.stats())
