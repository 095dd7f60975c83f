"""Divides devices, CPU threads and memory among several engines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from trencadis.core.config import EngineConfig
from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.devices import choose, likely
from trencadis.core.errors import StartupError
from trencadis.core.executor.rank_info import requested_threads


def divide_resources(config: EngineConfig, size: int, environ: Mapping[str, str] | None = None) -> list[EngineConfig]:
    """Returns the configurations of ``size`` engines.

    Engine i has the cards [i * tp, (i + 1) * tp), counted from the one that ``--device`` names. On a CPU, which all
    share, the threads, the KV cache and the share of the memory are divided. Host memory for KV blocks is divided
    everywhere.

    Raises:
        StartupError: ``--device`` names no device.
    """
    if size == 1:
        return [config]
    config = dataclasses.replace(config, report_evictions=True, kv_offloading_size=config.kv_offloading_size / size)
    if likely(config.device) == "cpu":
        threads = requested_threads(config.threads, os.environ if environ is None else environ) or computing_cpus()
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


def divide_resources_over_nodes(
    config: EngineConfig, size: int, max_per_node: int, environ: Mapping[str, str] | None = None
) -> list[EngineConfig]:
    """Returns the configurations of ``size`` engines on several machines, at most ``max_per_node`` of them on one.

    Each engine sees only its own cards, numbered from 0. Shared resources of a machine are divided by ``max_per_node``.

    Raises:
        StartupError: ``--device`` names a card, which the cluster must choose, or no device.
    """
    name = likely(config.device)
    if name == "cpu":
        return [
            dataclasses.replace(one, report_evictions=True)
            for one in divide_resources(config, max_per_node, environ)[:1] * size
        ]
    if ":" in config.device:
        raise StartupError(f"--device {config.device}: Ray chooses the cards of its nodes: --device {name}")
    offloaded = config.kv_offloading_size / max_per_node
    return [dataclasses.replace(config, device=name, report_evictions=True, kv_offloading_size=offloaded)] * size
