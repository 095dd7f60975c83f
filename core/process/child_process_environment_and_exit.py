"""Child processes of this project: their environment and their main function. Torch-free."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trencadis.core import envs
from trencadis.core.host_memory import volunteer_for_oom_kill
from trencadis.core.process.log_setup import flush_logs

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

STOPPED_LOOKS = 3
"""Looks after which a stopped process counts as lost."""

WAITS = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
"""How long threads of OpenMP runtimes (GCC's, LLVM's) spin when idle: rounds of about 25 ns, and milliseconds."""


def python_path(environ: Mapping[str, str]) -> str:
    """Returns PYTHONPATH for a child: the folder that holds this package, then the value in ``environ``.

    The folder is looked up in ``sys.modules``: importing the package here would be a cycle, as its ``__init__`` imports
    every module.
    """
    package = sys.modules[__name__.partition(".")[0]]
    root = str(Path(package.__file__ or "").resolve().parent.parent)
    rest = environ.get("PYTHONPATH")
    return root + os.pathsep + rest if rest else root


def environment(environ: Mapping[str, str], threads: int, fixed: bool) -> dict[str, str]:
    """Returns ``environ`` for a child: without secrets, with this package first on the path, and with thread counts.

    The engine and its ranks need no secrets, because they neither answer clients nor access the hub. torch reads the
    thread counts when it is imported, so the parent has to set them.

    Args:
        fixed: replace thread counts that are already set.
    """
    env = {name: value for name, value in environ.items() if not envs.secret(name)}
    # torch reads this once, when its allocator starts; huge pages give weights about 5 % more bandwidth.
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # torch's threads share their CPUs with this package's kernels, which would be delayed if torch's threads spun for
    # milliseconds after each operation, as they do by default.
    if not env.get("OMP_WAIT_POLICY"):
        for name, value in WAITS.items():
            env.setdefault(name, value)
    env["PYTHONPATH"] = python_path(env)
    for name in THREAD_VARIABLES:
        if fixed or not env.get(name):
            env[name] = str(threads)
    return env


def spawn_child(
    module: str, environ: Mapping[str, str], *words: str, shared: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs a module in a process of its own; returns the process and this end of a socket pair.

    The module's first argument is the descriptor of the other end; it ends when this end is closed.

    Args:
        words: its further arguments.
        shared: further descriptors that it inherits.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *words],
            pass_fds=(theirs.fileno(), *shared),
            stdin=subprocess.DEVNULL,
            env=environ,
        )
    return process, ours


def run(work: Callable[[socket.socket], int], oom_score: int = 500) -> NoReturn:
    """Runs ``work`` on the socket whose descriptor is the command's argument; exits with the code that it returns.

    The terminal sends signals to the whole process group; children ignore them and are ended by the parent.

    Args:
        oom_score: see ``volunteer_for_oom_kill``.
    """
    volunteer_for_oom_kill(oom_score)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_now(work(socket.socket(fileno=int(sys.argv[1]))))


class StopWatch:
    """Tells whether a child process has been stopped (SIGSTOP) at several looks in a row: it neither works nor ends.

    Args:
        process: the child; only one of this machine can be looked at, any other never counts as stopped.
        looks: looks, a second apart, after which it counts as stopped.
    """

    def __init__(self, process: object, looks: int = STOPPED_LOOKS) -> None:
        self._pid = process.pid if isinstance(process, subprocess.Popen) else 0
        self._looks, self._seen = looks, 0

    def look(self) -> bool:
        """Looks once; returns True if the process counts as stopped."""
        self._seen = self._seen + 1 if self._pid and read_stat(self._pid)[0] == "T" else 0
        return self._seen >= self._looks


def read_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the process's state on; a single "X" if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split() or ["X"]
    except OSError:
        return ["X"]


RANK_FOLDER = "trencadis-ranks-"
"""How the name of a folder begins over which the ranks of an engine meet; the engine's process id follows."""


def remove_rank_folders(pid: int) -> None:
    """Removes the folders of an engine that has ended: one that was killed could not, nor ranks killed with it."""
    with suppress(OSError):  # there may be no temporary folder at all, and so nothing in it
        for folder in Path(tempfile.gettempdir()).glob(f"{RANK_FOLDER}{pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)


CLEANUPS: list[Callable[[], None]] = []
"""What a process removes when it ends by ``exit_now``, such as folders that its own death would leave behind."""


def exit_now(code: int) -> NoReturn:
    """Ends the process from any thread, after ``CLEANUPS`` and the last lines of log.

    The tear-down of device libraries may fail or wait for ranks that are gone, so it is skipped.
    """
    for clean in CLEANUPS:
        with suppress(Exception):
            clean()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it is closed (None), full or broken
            stream.flush()
    flush_logs()
    os._exit(code)
