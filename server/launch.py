"""Starts the engine's process. Called first of all, before FastAPI is imported, so that torch loads meanwhile."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import trencadis
from trencadis.core import wire
from trencadis.core.config import EngineConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(slots=True)
class EngineHandle:
    """The process and our end of its socket."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    def kill(self) -> None:
        """Ends it at once and reaps it."""
        self.sock.close()
        self.process.kill()
        self.process.wait()


def spawn(config: EngineConfig) -> EngineHandle:
    """A fresh engine process that has been told what to serve."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trencadis.core.proc", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=child_environment(config, os.environ),
        )
    ours.sendall(wire.frame(wire.Start(config)))
    return EngineHandle(process, ours)


def child_environment(config: EngineConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment with its own ``trencadis`` first on the path and the thread counts set.

    Thread pools read their variables when torch is imported, so the parent has to decide.
    """
    env = dict(environ)
    # torch reads it once, when its allocator starts: huge pages give weights about 5 % more bandwidth.
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    root = str(Path(trencadis.__file__ or "").resolve().parent.parent)
    rest = env.get("PYTHONPATH")
    env["PYTHONPATH"] = root + os.pathsep + rest if rest else root
    for name in THREAD_VARIABLES:
        if config.threads is not None or not env.get(name):
            env[name] = str(config.threads or available_cpus())
    return env


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: its affinity, cut by the cgroup's quota (v2, then v1)."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cpus
    if not quota.isdigit():
        return cpus
    return max(1, min(cpus, math.ceil(int(quota) / int(period))))
