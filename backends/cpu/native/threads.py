"""Gives the kernels the threads that torch's own operations run on.

The library links no OpenMP runtime. It gets the functions of the one that torch is linked with, by address, so that
there is one pool of threads, whichever runtime a build of torch brings and under whatever name.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trencadis.backends.cpu.native.library import found

log = logging.getLogger("trencadis.engine")

NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
"""Of GCC's interface, which Intel's and LLVM's runtimes have too."""


class Calls(NamedTuple):
    """Functions of the library; the interpreter's lock is released while one runs."""

    linear: Callable[..., int]
    rows: Callable[..., None]
    attend: Callable[..., int]
    flash: Callable[..., int]
    turn: Callable[..., None]
    dense: Callable[..., None]
    pack: Callable[..., None]
    pin: Callable[..., None]


@cache
def calls() -> Calls:
    """The library's functions, on torch's threads from now on."""
    library = found().library
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    linear, rows = library.trencadis_panels_linear, library.trencadis_panels_rows
    linear.argtypes = (pointer, pointer, pointer, size, number, number, number)
    linear.restype = number
    rows.argtypes = (number, *(pointer,) * 4, size, size, ctypes.c_float, number, number, number)
    rows.restype = None
    attend = library.trencadis_panels_attend
    attend.argtypes, attend.restype = (pointer, number, number), number
    flash = library.trencadis_flash
    flash.argtypes, flash.restype = (pointer, number, number), number
    turn = library.trencadis_turn
    turn.argtypes, turn.restype = (pointer, size, number, number), None
    dense = library.trencadis_dense
    dense.argtypes = (*(pointer,) * 4, size, size, size, ctypes.c_float, number, number)
    dense.restype = None
    pack = library.trencadis_dense_pack
    pack.argtypes, pack.restype = (pointer, size, number, number), None
    pin = library.trencadis_pool_pin
    pin.argtypes, pin.restype = (pointer, number), None
    return Calls(linear, rows, attend, flash, turn, dense, pack, pin)


def keep_to(cpus: Sequence[int]) -> None:
    """Keeps torch's threads to one of ``cpus`` each, the caller and threads that it starts later to all of them."""
    os.sched_setaffinity(0, cpus)
    if found().library is not None:
        calls().pin((ctypes.c_int * len(cpus))(*cpus), len(cpus))


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
