"""The environment of this project's own processes. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import trencadis

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def environment(environ: Mapping[str, str], threads: int, fixed: bool) -> dict[str, str]:
    """``environ`` with our own ``trencadis`` first on the path and the thread counts set.

    Thread pools read their variables when torch is imported, so the parent has to decide.

    Args:
        fixed: also where the variables say otherwise.
    """
    env = dict(environ)
    # torch reads it once, when its allocator starts: huge pages give weights about 5 % more bandwidth.
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    root = str(Path(trencadis.__file__ or "").resolve().parent.parent)
    rest = env.get("PYTHONPATH")
    env["PYTHONPATH"] = root + os.pathsep + rest if rest else root
    for name in THREAD_VARIABLES:
        if fixed or not env.get(name):
            env[name] = str(threads)
    return env
