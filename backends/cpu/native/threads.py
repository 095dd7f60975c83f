"""Gives the kernels the threads that torch's own operations run on.

The library links no OpenMP runtime. It gets the functions of the one that torch is linked with, by address, so that
there is one pool of threads, whichever runtime a build of torch brings and under whatever name.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trencadis.backends.cpu.native import library

log = logging.getLogger("trencadis.engine")

NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
"""Of GCC's interface, which Intel's and LLVM's runtimes have too."""


@cache
def multiply() -> Callable[..., int]:
    """``trencadis_panels_linear``, ready to be called; the interpreter's lock is released meanwhile."""
    found = library.found().library
    runtime = openmp()
    if runtime is None:
        log.warning("weights: torch's OpenMP runtime is not found, so own kernels run on one thread")
    else:
        found.trencadis_panels_threads(*(ctypes.cast(f, ctypes.c_void_p) for f in runtime))
    call: Any = found.trencadis_panels_linear
    pointer = ctypes.c_void_p
    call.argtypes = (pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    call.restype = ctypes.c_int
    made: Callable[..., int] = call
    return made


def openmp() -> list[Any] | None:
    """The functions of ``NAMES`` as torch's library resolves them."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (str(own), None):
        try:
            seen = ctypes.CDLL(name)
            return [getattr(seen, each) for each in NAMES]
        except (OSError, AttributeError):
            continue
    return None
