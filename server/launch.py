"""Starts the engine's process. Called first of all, before FastAPI is imported, so that torch loads meanwhile."""

from __future__ import annotations

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
from trencadis.core.cpus import available_cpus

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
