"""This project's own processes: their environment, and how one runs. Torch-free."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from trencadis.core import envs

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def import_root() -> str:
    """The folder that holds the package of this module: what a child's PYTHONPATH begins with.

    Asked of ``sys.modules``: the package's ``__init__`` names the whole public face, which imports this module.
    """
    package = sys.modules[__name__.partition(".")[0]]
    return str(Path(package.__file__ or "").resolve().parent.parent)


def environment(environ: Mapping[str, str], threads: int, fixed: bool) -> dict[str, str]:
    """``environ`` with our own ``trencadis`` first on the path and the thread counts set, and without keys.

    Neither the engine nor a rank answers clients or asks the hub: the process that starts them has done that.
    Thread pools read their variables when torch is imported, so the parent has to decide.

    Args:
        fixed: also where the variables say otherwise.
    """
    env = {name: value for name, value in environ.items() if not envs.secret(name)}
    # torch reads it once, when its allocator starts: huge pages give weights about 5 % more bandwidth.
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    root = import_root()
    rest = env.get("PYTHONPATH")
    env["PYTHONPATH"] = root + os.pathsep + rest if rest else root
    for name in THREAD_VARIABLES:
        if fixed or not env.get(name):
            env[name] = str(threads)
    return env


def run(work: Callable[[socket.socket], int]) -> NoReturn:
    """Does ``work`` over the socket whose number is the command's argument and ends with its exit code.

    Signals of the terminal reach every process of the group; only the parent acts on them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = work(socket.socket(fileno=int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    # Tear-down of device libraries must not decide the exit code, nor wait for ranks that are gone.
    os._exit(code)
