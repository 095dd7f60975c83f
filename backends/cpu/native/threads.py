"""Calls of the library, and the threads that its launches run on (thread_pool.h).

They are the library's own, where it multiplies as well: a launch waits for no thread that the system has put aside.
Launches between oneDNN's products run on torch's threads. The library links no OpenMP runtime: it gets the functions of
the one that torch is linked with, by address, so that there is one of them, whichever a build of torch brings.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trencadis.backends.cpu.native.library import load_library

GOMP_PARALLEL = "GOMP_parallel"
"""Of GCC's interface, which Intel's and LLVM's runtimes have too."""

OMP_THREAD = "omp_get_thread_num"


class PoolCalls(NamedTuple):
    """The threads of launches, numbered from 1 on; the caller is 0."""

    in_use: Callable[[int], int]
    """(threads that a launch asks for) -> how many it would get."""
    system_id: Callable[[int], int]
    """The number that the system knows a thread by; 0: there is none."""
    charge: Callable[[int, int], None]
    """(thread, nanoseconds): it is known to have waited for a CPU for so long."""
    late: Callable[[int], int]
    """Nanoseconds for which a thread came late to launches since the last call, by the library's own clock."""
    tend: Callable[[int], None]
    """Tries threads that are left out, or (1) takes all of them back."""
    on_torch: Callable[[int], None]
    """1: launches run on torch's threads, as the operations between them do."""
    patient: Callable[[int], None]
    """For tests. 1: no thread is left out."""
    hold: Callable[[int, int, int], None]
    """For tests: (thread, nanoseconds, inside): it sleeps before its next launch, or inside of it."""


class Calls(NamedTuple):
    """Functions of the library; the interpreter's lock is released while one runs."""

    linear: Callable[..., int]
    rows: Callable[..., None]
    attend: Callable[..., int]
    flash: Callable[..., int]
    rotate: Callable[..., None]
    dense: Callable[..., None]
    pack: Callable[..., None]
    pin: Callable[..., None]
    pool: PoolCalls


@cache
def calls() -> Calls:
    """The library's functions."""
    library = load_library().library
    runtime = openmp()
    if runtime is not None:
        library.trencadis_pool_of_torch(*(ctypes.cast(f, ctypes.c_void_p) for f in runtime))
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
    rotate = library.trencadis_rotary
    rotate.argtypes, rotate.restype = (pointer, size, number, number), None
    dense = library.trencadis_dense
    dense.argtypes = (*(pointer,) * 4, size, size, size, ctypes.c_float, number, number)
    dense.restype = None
    pack = library.trencadis_dense_pack
    pack.argtypes, pack.restype = (pointer, size, number, number), None
    pin = library.trencadis_pool_pin
    pin.argtypes, pin.restype = (pointer, number), None
    return Calls(linear, rows, attend, flash, rotate, dense, pack, pin, pool())


def pool() -> PoolCalls:
    """The library's functions about its threads."""
    number, size = ctypes.c_int, ctypes.c_int64
    made = []
    for name, result, *arguments in (
        ("in_use", number, number),
        ("system_id", size, number),
        ("charge", None, number, size),
        ("late", size, number),
        ("tend", None, number),
        ("on_torch", None, number),
        ("patient", None, number),
        ("hold", None, number, size, number),
    ):
        call = getattr(load_library().library, f"trencadis_pool_{name}")
        call.argtypes, call.restype = arguments, result
        made.append(call)
    return PoolCalls(*made)


def pin_threads(cpus: Sequence[int]) -> None:
    """Keeps threads to one of ``cpus`` each, the caller and threads that it starts later to all of them."""
    os.sched_setaffinity(0, cpus)
    if load_library().library is not None:
        calls().pin((ctypes.c_int * len(cpus))(*cpus), len(cpus))
    keep_torch_to(cpus)


def keep_torch_to(cpus: Sequence[int]) -> None:
    """Keeps torch's threads, but for the caller, to one of ``cpus`` each; not where its OpenMP runtime is unknown."""
    runtime = openmp()
    if runtime is None or len(cpus) < 2:
        return
    parallel, thread_number = runtime

    def pin(_: int | None) -> None:
        if thread_number():  # the first is the caller's, whose later threads would all be kept to its CPU
            os.sched_setaffinity(0, {cpus[thread_number()]})

    parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(pin), None, len(cpus), 0)


def openmp() -> tuple[Any, Any] | None:
    """The functions of torch's OpenMP runtime that start threads and that number them; None: not found."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (str(own), None):
        try:
            seen = ctypes.CDLL(name)
            return getattr(seen, GOMP_PARALLEL), getattr(seen, OMP_THREAD)
        except (OSError, AttributeError):
            continue
    return None
