"""Chooses how many threads compute: those that the system keeps from running are left out until they run promptly
again.

The library times its own launches, and leaves out a thread that costs more time than it saves (native/thread_pool.c).
This module adds the system's accounting to that, or, without it, how late threads started; torch gets as many threads
as the library uses, and changes are logged.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from trencadis.backends.cpu.native import kernel_threads
from trencadis.backends.cpu.native.kernel_library import load_library

log = logging.getLogger("trencadis.engine")

INTERVAL = 0.05
"""Seconds between two reads of the system's accounting."""

PAUSE = 1.0
"""Seconds without a launch after which measurements are out of date: all threads are tried again."""

SHARE = 0.25
"""Share of the time between two reads: a thread that waited for a CPU for longer is charged with it."""

QUIET = 10.0
"""Minimum seconds between two log lines."""


class ThreadPool(Protocol):
    """The library's functions about its threads; see ``kernel_threads.PoolCalls``."""

    def in_use(self, asked: int, /) -> int: ...
    def system_id(self, worker: int, /) -> int: ...
    def charge(self, worker: int, nanoseconds: int, /) -> None: ...
    def late(self, worker: int, /) -> int: ...
    def tend(self, everyone: int, /) -> None: ...
    def on_torch(self, on: int, /) -> None: ...


def run_delay(task: int, root: Path = Path("/proc/self/task")) -> int | None:
    """Returns nanoseconds for which a thread of this process has waited for a CPU; None: the system does not report
    it.
    """
    try:
        return int((root / str(task) / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def stolen_time(cpus: Collection[int], stat: Path = Path("/proc/stat")) -> int:
    """Returns the sum of nanoseconds that a hypervisor took from ``cpus``; 0: the system does not report it."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
        ticks = sum(int(fields[8]) for fields in lines if fields[0][3:].isdigit() and int(fields[0][3:]) in cpus)
    except (OSError, ValueError, IndexError):
        return 0
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class ThreadUse:
    """The threads of one engine's launches, each of which runs inside ``launch``.

    Args:
        count: threads of the engine.
        own_rows: most rows of launches whose products are the library's; oneDNN multiplies in larger ones.
        pool: the library's threads.
        tasks, stat: paths of the system's accounting.
        clock: returns seconds.
    """

    def __init__(
        self,
        count: int,
        own_rows: int,
        pool: ThreadPool,
        tasks: Path = Path("/proc/self/task"),
        stat: Path = Path("/proc/stat"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = self.in_use = count
        self._own_rows = own_rows
        self._pool, self._tasks, self._stat, self._clock = pool, tasks, stat, clock
        self._cpus = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
        self._delays: Mapping[int, int] = {}
        self._stolen = stolen_time(self._cpus, stat)
        self._called = self._looked = clock()
        self._logged = self._looked - QUIET
        self._said = count

    @contextmanager
    def launch(self, rows: int, alone: bool = False) -> Iterator[None]:
        """Sets the calling thread's numbers of threads for a launch of ``rows`` rows.

        Reads the system's accounting every ``INTERVAL`` seconds.

        Args:
            alone: the launch leaves its large operations to the library. If its products are the library's, too, torch
                gets one thread: the threads of its OpenMP runtime spin after each operation, on the CPUs that the
                library's threads need for the next one.
        """
        now = self._clock()
        on_torch = rows > self._own_rows
        self._pool.on_torch(int(on_torch))
        if now - self._looked >= INTERVAL:
            self._look(now)
        self._called = now
        alone = alone and not on_torch
        self._set(1 if alone else self.in_use, self.in_use if alone else 0)
        try:
            yield
        finally:
            if alone:
                self._set(self.in_use, 0)

    def _set(self, of_torch: int, of_library: int) -> None:
        kernel_threads.launches.threads = of_library
        if torch.get_num_threads() != of_torch:
            torch.set_num_threads(of_torch)

    def _look(self, now: float) -> None:
        passed, idle = now - self._looked, now - self._called > PAUSE
        self._looked = now
        if not idle:
            self._charge(passed)
        self._pool.tend(int(idle))
        self.in_use = self._pool.in_use(self.count)
        if self.in_use != self._said and now - self._logged >= QUIET:
            self._logged, self._said = now, self.in_use
            why = "all run promptly" if self.in_use == self.count else "the CPUs are busy with other work"
            log.info("cpu: %d of %d threads in use: %s", self.in_use, self.count, why)

    def _charge(self, passed: float) -> None:
        """Charges threads with the time for which they waited since the last read."""
        stolen = stolen_time(self._cpus, self._stat)
        each, self._stolen = (stolen - self._stolen) // max(len(self._cpus), 1), stolen
        delays = dict[int, int]()
        for worker in range(1, self.count):
            task = self._pool.system_id(worker)
            delay, late = run_delay(task, self._tasks) if task else None, self._pool.late(worker)
            if delay is not None:
                delays[task], late = delay, delay - self._delays.get(task, delay)
            waited = each + late
            if waited > SHARE * passed * 1e9:
                self._pool.charge(worker, waited)
        self._delays = delays


def thread_use(count: int, own_rows: int) -> ThreadUse | None:
    """Returns the threads of an engine with ``count``; None for a single thread, or without a library that times its
    launches.
    """
    return (
        ThreadUse(count, own_rows, kernel_threads.calls().pool)
        if count > 1 and load_library().library is not None
        else None
    )
