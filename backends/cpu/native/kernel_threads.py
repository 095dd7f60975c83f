"""Calls of the library, and the threads that its launches run on (thread_pool.h).

If the library also multiplies, they are its own: a launch does not wait for a thread that the system has suspended.
Launches between oneDNN's products run on torch's threads. The library links no OpenMP runtime: it gets the addresses of
the functions of torch's runtime, so that there is only one runtime, whichever a build of torch contains.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from trencadis.backends.cpu.native.kernel_library import load_library

GOMP_PARALLEL = "GOMP_parallel"
"""Function of GCC's OpenMP interface, which Intel's and LLVM's runtimes have too."""

OMP_THREAD = "omp_get_thread_num"


class PoolCalls(NamedTuple):
    """Functions about the threads of launches, which are numbered from 1; the caller is 0."""

    in_use: Callable[[int], int]
    """(threads that a launch requests) -> threads that it would get."""
    system_id: Callable[[int], int]
    """(thread) -> its system id; 0: there is no such thread."""
    charge: Callable[[int, int], None]
    """(thread, nanoseconds): charges a thread with time for which it waited for a CPU."""
    late: Callable[[int], int]
    """(thread) -> nanoseconds that it started late since the last call, by the library's own clock."""
    tend: Callable[[int], None]
    """0: tries threads that are left out; 1: takes all of them back."""
    on_torch: Callable[[int], None]
    """1: launches run on torch's threads, like the operations between them."""
    patient: Callable[[int], None]
    """For tests; 1: no thread is left out."""
    hold: Callable[[int, int, int], None]
    """For tests; (thread, nanoseconds, inside): makes a thread sleep before its next launch, or inside it."""


class Calls(NamedTuple):
    """Functions of the library; the GIL is released while one runs."""

    linear: Callable[..., int]
    rows: Callable[..., None]
    head_norms: Callable[..., None]
    gate_heads: Callable[..., None]
    gated_norm: Callable[..., None]
    attend: Callable[..., int]
    flash: Callable[..., int]
    rotate: Callable[..., None]
    convolve: Callable[..., None]
    delta_rule: Callable[..., int]
    delta_net: Callable[..., int]
    adapters: Callable[..., int]
    experts: Callable[..., int]
    dense: Callable[..., int]
    pack: Callable[..., None]
    pin: Callable[..., None]
    replay: Callable[..., int]
    pool: PoolCalls


class LaunchThreads(threading.local):
    """Threads of this thread's launches; 0: as many as torch uses."""

    threads = 0
    recorder: Calls | None = None
    """Functions that record this thread's calls, in place of the library's; None: they are not recorded."""


launches = LaunchThreads()


def launch_threads() -> int:
    """Returns how many threads the calling thread's launches request."""
    return launches.threads or torch.get_num_threads()


def _bind(name: str, result: object, *arguments: object) -> Callable[..., Any]:
    """Returns the library's function ``trencadis_<name>`` with the C types of its result and arguments."""
    call = getattr(load_library().library, f"trencadis_{name}")
    call.argtypes, call.restype = arguments, result
    return cast("Callable[..., Any]", call)


def calls() -> Calls:
    """Returns the library's functions, or those that record the calling thread's calls."""
    return launches.recorder or _bound_calls()


@cache
def _bound_calls() -> Calls:
    runtime = openmp()
    if runtime:
        load_library().library.trencadis_pool_of_torch(*(ctypes.cast(f, ctypes.c_void_p) for f in runtime))
    pointer, number, size, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    four = (pointer,) * 4
    adapters = (pointer, pointer, size, pointer, size, size, pointer, size, number, number)
    return Calls(
        linear=_bind("panels_linear", number, pointer, pointer, pointer, size, number, number, number),
        rows=_bind("panels_rows", None, number, *four, size, size, real, number, number, number),
        head_norms=_bind("head_norms", None, number, *four[1:], *[size] * 5, real, number, number, number),
        gate_heads=_bind("gate_heads", None, *four[1:], *[size] * 5, number, number, number),
        gated_norm=_bind("gated_norm", None, *four, size, size, size, size, real, number, number, number),
        attend=_bind("panels_attend", number, pointer, number, number),
        flash=_bind("flash", number, pointer, number, number),
        rotate=_bind("rotary", None, pointer, size, number, number),
        convolve=_bind("convolve", None, pointer, number, number),
        delta_rule=_bind("delta_rule", number, pointer, number, number),
        delta_net=_bind("delta_net", number, pointer, number, number),
        adapters=_bind("adapters", number, *adapters),
        experts=_bind("experts", number, *four[1:], number, pointer, size, number, number),
        dense=_bind("dense", number, *four, size, size, size, real, number, number),
        pack=_bind("dense_pack", None, pointer, size, number, number),
        pin=_bind("pool_pin", None, pointer, number),
        replay=_bind("replay", number, pointer, size, pointer, number),
        pool=pool(),
    )


def pool() -> PoolCalls:
    """Returns the library's functions about its threads."""
    number, size = ctypes.c_int, ctypes.c_int64
    return PoolCalls(
        in_use=_bind("pool_in_use", number, number),
        system_id=_bind("pool_system_id", size, number),
        charge=_bind("pool_charge", None, number, size),
        late=_bind("pool_late", size, number),
        tend=_bind("pool_tend", None, number),
        on_torch=_bind("pool_on_torch", None, number),
        patient=_bind("pool_patient", None, number),
        hold=_bind("pool_hold", None, number, size, number),
    )


def pin_threads(cpus: Sequence[int]) -> None:
    """Pins each thread to one of ``cpus``; the caller and threads that it starts later may use all of them."""
    os.sched_setaffinity(0, cpus)
    if load_library().library is not None:
        calls().pin((ctypes.c_int * len(cpus))(*cpus), len(cpus))
    keep_torch_to(cpus)


def keep_torch_to(cpus: Sequence[int]) -> None:
    """Pins torch's threads, except the caller, to one of ``cpus`` each; does nothing if its OpenMP runtime is
    unknown.
    """
    runtime = openmp()
    if not runtime or len(cpus) < 2:
        return
    parallel, thread_number = runtime

    def pin(_: int | None) -> None:
        if thread_number():  # thread 0 is the caller, whose later threads would all be pinned to its CPU
            os.sched_setaffinity(0, {cpus[thread_number()]})

    parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(pin), None, len(cpus), 0)


def openmp() -> Sequence[Any]:
    """Returns the functions of torch's OpenMP runtime that start threads and that number them; empty: not found."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (str(own), None):
        try:
            seen = ctypes.CDLL(name)
            return getattr(seen, GOMP_PARALLEL), getattr(seen, OMP_THREAD)
        except (OSError, AttributeError):
            continue
    return ()
