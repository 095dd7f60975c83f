"""Starts the engine's process, before FastAPI is imported, so that torch loads in parallel."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.engine_config import EngineConfig
from trencadis.core.executor.rank_info_and_fingerprint import requested_threads, threads_of
from trencadis.core.links.rank_placement import RAY, topology
from trencadis.core.process import engine_messages, torch_detection
from trencadis.core.process.child_process_environment_and_exit import environment, remove_rank_folders, spawn_child

RAY_TOKEN = "RAY_AUTH_TOKEN"

log = logging.getLogger("trencadis.server")


class EngineProcessHandle(Protocol):
    """Protocol of an engine's process, on this machine or another; ``subprocess.Popen`` implements it."""

    returncode: int | None
    """Exit code; None while the process runs."""

    @property
    def pid(self) -> int:
        """Process id; 0 for a process on another machine."""
        ...

    def poll(self) -> int | None:
        """Returns the current ``returncode``."""
        ...

    def kill(self) -> None:
        """Kills the process; does nothing if it has ended."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code and returns it."""
        ...


@dataclass(slots=True)
class EngineHandle:
    """The process and our end of its socket.

    Args:
        successor: starts another engine in its place; None: ``spawn_engine``.
    """

    process: EngineProcessHandle
    sock: socket.socket
    successor: Callable[[EngineConfig], EngineHandle] | None = None

    def start_successor(self, config: EngineConfig) -> EngineHandle:
        """Starts a successor of this engine, which has ended.

        Raises:
            StartupError: see ``spawn_engine``.
        """
        return (self.successor or spawn_engine)(config)

    def kill(self) -> None:
        """Kills the process, reaps it, and removes what it could leave behind."""
        self.sock.close()
        self.process.kill()
        self.process.wait()
        if isinstance(self.process, subprocess.Popen):
            remove_rank_folders(self.process.pid)


def spawn_engine(config: EngineConfig) -> EngineHandle:
    """Starts an engine process and sends it the configuration.

    Raises:
        StartupError: the device cannot start with this torch, plug-in or environment.
    """
    environ = make_child_environment(config, os.environ)
    process, ours = spawn_child("trencadis.core.process.engine_process", environ)
    ours.sendall(engine_messages.frame(engine_messages.Start(make_child_config(config, os.environ).without_secrets())))
    return EngineHandle(process, ours)


def make_child_config(config: EngineConfig, environ: Mapping[str, str]) -> EngineConfig:
    """Returns ``config`` with the threads of all ranks; OMP_NUM_THREADS of the child is the share of rank 0 only."""
    threads = requested_threads(config.threads, environ) or computing_cpus()
    return dataclasses.replace(config, threads=threads)


def make_child_environment(config: EngineConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the engine process, with the threads of rank 0, which runs in it. The device's
    variables, which are needed before torch is imported, are set here, so that a start that cannot succeed ends at
    once. The device's lines are logged.
    """
    ranks = topology(config, environ).here
    threads = threads_of(requested_threads(config.threads, environ), ranks)
    made = environment(environ, threads, config.threads is not None or ranks > 1)
    if config.distributed_executor_backend == RAY and RAY_TOKEN in environ:
        made[RAY_TOKEN] = environ[RAY_TOKEN]  # the engine requests its ranks from the cluster
    if config.engine == EngineConfig().engine:
        for line in torch_detection.prepare_device_env(config.device, made, world=ranks).lines:
            log.info("%s", line)
    return made
