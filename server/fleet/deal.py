"""What each of several engines gets: its cards, its share of a CPU's threads and memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from trencadis.core.config import EngineConfig
from trencadis.core.cpus import computing_cpus
from trencadis.core.devices import choose, likely
from trencadis.core.executor.ranks import asked_threads


def deal(config: EngineConfig, size: int, environ: Mapping[str, str] | None = None) -> list[EngineConfig]:
    """The configurations of ``size`` engines.

    Engine i has the cards [i * tp, (i + 1) * tp), counted from the one that ``--device`` names. On a CPU, where all
    share one machine, the threads, the KV cache and the share of the memory are divided. Host memory for KV blocks is
    divided everywhere.

    Raises:
        StartupError: ``--device`` names no device.
    """
    if size == 1:
        return [config]
    config = dataclasses.replace(config, report_evictions=True, kv_offloading_size=config.kv_offloading_size / size)
    if likely(config.device) == "cpu":
        threads = asked_threads(config.threads, os.environ if environ is None else environ) or computing_cpus()
        asked = config.kv_cache_memory_bytes
        config = dataclasses.replace(
            config,
            threads=max(threads // size, 1),
            kv_cache_memory_bytes=None if asked is None else max(asked // size, 1),
            gpu_memory_utilization=config.gpu_memory_utilization / size,
        )
        return [config] * size
    name, first, _ = choose(config.device)
    cards = config.ranks
    return [dataclasses.replace(config, device=f"{name}:{first + i * cards}") for i in range(size)]
