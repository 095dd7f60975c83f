"""Reads a checkpoint ahead of its use. Torch-free.

While torch is still being imported, the kernel is asked to read whole files, since page faults read only a few pages
each and the disk would idle in between. Later, a thread populates the page tables, many pages per call, while other
weights are packed. A file of packed weights is mapped directly: faults read it into huge pages if the file system
supports them. Reading it by advice gives small pages, at two thirds of the speed, but uses less CPU time.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trencadis.core.errors import StartupError
from trencadis.core.host_memory import free_host
from trencadis.core.weight_files import files_of

log = logging.getLogger("trencadis.engine")

WINDOW = 64 << 20
"""Bytes requested from the kernel per call."""

PAGES = 2 << 20
"""Bytes populated per call (one huge page): other threads that map memory wait for the call."""

READERS = 4
"""Threads that read from the disk, so that the kernel's read-ahead window (often 128 KiB) is no limit."""

SHARE = 0.5
"""Largest share of the free memory that files may take; otherwise pages would be evicted before they are used."""

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14."""


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Returns the C library's ``madvise``, which, unlike mmap's, releases the GIL; None if it is unavailable."""
    try:
        found = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call: Callable[[int, int, int], int] = found
    return call


def advise_needed(start: int, end: int) -> None:
    """Asks the kernel to read mapped memory [start, end), without waiting for it."""
    advise = _madvise()
    if advise is not None and hasattr(mmap, "MADV_WILLNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        advise(first, end - first, mmap.MADV_WILLNEED)


def start_prefetch(folder: str, load_format: str = "auto", kept: Path | None = None) -> threading.Thread | None:
    """Reads the weights of a checkpoint folder ahead in a thread; returns None if there are none, or too little memory.

    Errors in the folder are not reported here, but when it is loaded.

    Args:
        kept: a file of packed weights, which is read instead if it exists.
    """
    if load_format == "dummy" or not hasattr(os, "posix_fadvise") or not os.path.isdir(folder):
        return None
    try:
        files = [kept] if kept is not None and kept.is_file() else files_of(Path(folder), load_format)
        if sum(file.stat().st_size for file in files) > SHARE * free_host():
            return None
    except (StartupError, OSError):
        return None
    work = _populate_files if files == [kept] else _advise_files
    thread = threading.Thread(target=work, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _advise_files(files: Sequence[Path]) -> None:
    for file in files:
        try:
            with file.open("rb") as f:
                size = os.fstat(f.fileno()).st_size
                for start in range(0, size, WINDOW):
                    os.posix_fadvise(f.fileno(), start, min(WINDOW, size - start), os.POSIX_FADV_WILLNEED)
        except OSError as error:
            log.debug("%s is not read ahead: %s", file, error)
            return


def _populate_files(files: Sequence[Path]) -> None:
    """Reads files by mapping them temporarily; falls back to ``_advise_files`` if the kernel lacks support."""
    for file in files:
        try:
            with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                populating = PagePopulator([data], READERS)
                populating.wait()
                populating.end()
        except (OSError, ValueError) as error:
            log.debug("%s is not read ahead: %s", file, error)
            return
        if not populating.entered:
            _advise_files([file])


class PagePopulator:
    """Populates page tables with mapped files in threads, in order, until ``end`` is called.

    Args:
        threads: number of threads; if there are several, the file is read into huge pages.

    Attributes:
        entered: bytes populated so far.
    """

    def __init__(self, maps: Sequence[mmap.mmap], threads: int = 1) -> None:
        self.entered = 0
        self._ended = threading.Event()
        self._held = [np.frombuffer(data, np.uint8) for data in maps]
        self._threads: list[threading.Thread] = []
        if sum(map(len, maps)) > SHARE * free_host():
            return
        # One iterator for all threads, so that the disk is read in order.
        pieces = iter([(held, start) for held in self._held for start in range(0, len(held), PAGES)])
        for data in maps if threads > 1 else ():
            with suppress(OSError, AttributeError):  # the kernel has no huge pages
                data.madvise(mmap.MADV_HUGEPAGE)
        for _ in range(threads):
            self._threads.append(threading.Thread(target=self._run, args=(pieces,), name="populate", daemon=True))
            self._threads[-1].start()

    def _run(self, pieces: Iterator[tuple[NDArray[np.uint8], int]]) -> None:
        advise = _madvise()
        if advise is None:
            return
        for held, start in pieces:
            size = min(PAGES, len(held) - start)
            if self._ended.is_set() or advise(held.ctypes.data + start, size, POPULATE_READ):
                return
            self.entered += size

    def wait(self) -> None:
        """Waits until all pages are populated."""
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Stops the threads after the calls in progress."""
        self._ended.set()
        self.wait()
        self._held.clear()
