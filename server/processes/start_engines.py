"""Starts the engines of a server, here or on a Ray cluster.

Divides devices, CPU threads and memory among several engines.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.devices import choose, likely
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.engine_process_launcher import EngineHandle, spawn_engine
from trencadis.core.executor.rank_info_and_fingerprint import requested_threads
from trencadis.core.links import rank_placement

if TYPE_CHECKING:
    from trencadis.core.executor.ray_engines import RayEngines


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
        return name_traces([config] * size)
    name, first, _ = choose(config.device)
    cards = config.ranks
    return name_traces([dataclasses.replace(config, device=f"{name}:{first + i * cards}") for i in range(size)])


def name_traces(configs: list[EngineConfig]) -> list[EngineConfig]:
    """Returns the configurations with a ``--record-trace`` of each engine's own: FILE, FILE.1, FILE.2 and so on."""
    return [
        dataclasses.replace(one, record_trace=f"{one.record_trace}.{i}") if one.record_trace and i else one
        for i, one in enumerate(configs)
    ]


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
        own = divide_resources(config, max_per_node, environ)[:1] * size
        return name_traces([dataclasses.replace(one, report_evictions=True) for one in own])
    if ":" in config.device:
        raise StartupError(f"--device {config.device}: Ray chooses the cards of its nodes: --device {name}")
    offloaded = config.kv_offloading_size / max_per_node
    own = [dataclasses.replace(config, device=name, report_evictions=True, kv_offloading_size=offloaded)] * size
    return name_traces(own)


log = logging.getLogger("trencadis.server")

RAY = "ray"


@dataclass(frozen=True)
class StartedEngines:
    """Configurations of the engines, and their processes, which may still be starting."""

    configs: list[EngineConfig]
    handles: list[EngineHandle]


def start_engines(
    config: EngineConfig, size: int, backend: str, begun: Callable[[EngineHandle], None]
) -> StartedEngines:
    """Starts ``size`` engines.

    Args:
        backend: ``mp`` or ``ray``, as ``--data-parallel-backend`` says.
        begun: called with each engine, so that those that started are ended if another one fails.

    Raises:
        StartupError: an engine cannot start, or the cluster has not enough free resources.
    """
    handles: list[EngineHandle] = []
    if backend == RAY:
        if config.distributed_executor_backend == RAY or config.nnodes > 1:
            raise StartupError(
                "--data-parallel-backend ray puts each engine on one node with all its ranks: leave out "
                "--distributed-executor-backend ray and --nnodes"
            )
        config = rank_placement.on_this_machine(config)
        cluster = _reserve_on_ray(config, size)
        start_on_ray, configs = cluster.start_engine, divide_resources_over_nodes(config, size, cluster.max_per_node)
    else:
        config, line = rank_placement.choose_executor_backend(config, os.environ)
        if line:
            log.warning("%s", line)
        start_on_ray, configs = None, divide_resources(config, size)
    for number, one in enumerate(configs):
        handles.append(_start_engine(one, size) if start_on_ray is None else start_on_ray(number, one))
        begun(handles[-1])
    return StartedEngines(configs, handles)


def _reserve_on_ray(config: EngineConfig, size: int, multi_node: bool = False) -> RayEngines:
    """Reserves resources for ``size`` engines on a Ray cluster."""
    # Imported late: it imports numpy, which would delay an engine on this machine.
    from trencadis.core.executor.ray_engines import RayEngines

    return RayEngines(config, size, multi_node=multi_node)


def _start_engine(config: EngineConfig, size: int) -> EngineHandle:
    """Starts an engine here, or on a node of the Ray cluster with a card for its first rank if this node has none."""
    if config.distributed_executor_backend == RAY and size == 1:
        cluster = _reserve_on_ray(config, 1, multi_node=True)
        if not cluster.on_this_node:
            return cluster.start_engine(0, config)
        cluster.close()  # the engine requests its ranks by itself
    return spawn_engine(config)
