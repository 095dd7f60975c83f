"""Reads a checkpoint before anything waits for it. Torch-free.

The disk is asked for whole files while torch is still being imported, since a page that is asked for when it is touched
comes with few others and the disk stands still in between. Then a thread enters pages into the page tables, many with
one call, while others are packed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from trencadis.core.errors import StartupError
from trencadis.core.memory.free_host import free_host
from trencadis.core.models.weight_files import files_of

log = logging.getLogger("trencadis.engine")

WINDOW = 64 << 20
"""Bytes that the kernel is asked for at a time."""

PAGES = 8 << 20
"""Bytes that are entered into the page tables at a time; whoever maps or unmaps memory waits for one call."""

SHARE = 0.5
"""Share of the free memory that files may take: what is read too early would be gone before it is used."""

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14."""


def begin(folder: str, load_format: str = "auto", kept: Path | None = None) -> threading.Thread | None:
    """Asks for the weights of a checkpoint folder in a thread; None where there is nothing to ask for, or no room.

    What is wrong with the folder is told by whoever loads it.

    Args:
        kept: a file of packed weights, which is asked for instead where there is one.
    """
    if load_format == "dummy" or not hasattr(os, "posix_fadvise") or not os.path.isdir(folder):
        return None
    try:
        files = [kept] if kept is not None and kept.is_file() else files_of(Path(folder), load_format)
        if sum(file.stat().st_size for file in files) > SHARE * free_host():
            return None
    except (StartupError, OSError):
        return None
    thread = threading.Thread(target=_ask, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _ask(files: Sequence[Path]) -> None:
    for file in files:
        try:
            with file.open("rb") as f:
                size = os.fstat(f.fileno()).st_size
                for start in range(0, size, WINDOW):
                    os.posix_fadvise(f.fileno(), start, min(WINDOW, size - start), os.POSIX_FADV_WILLNEED)
        except OSError as error:
            log.debug("%s is not read ahead: %s", file, error)
            return


class Populating:
    """A thread that enters mapped files into the page tables, in their order, until it is told to ``end``."""

    def __init__(self, maps: Sequence[mmap.mmap]) -> None:
        self._ended = threading.Event()
        self._maps = list(maps)
        self._thread: threading.Thread | None = None
        if sum(map(len, self._maps)) <= SHARE * free_host():
            self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            advise = ctypes.CDLL(None, use_errno=True).madvise  # releases the interpreter's lock, as mmap's does not
        except (OSError, AttributeError):
            return
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for data in self._maps:
            held = (ctypes.c_char * len(data)).from_buffer(data)
            for start in range(0, len(data), PAGES):
                size = min(PAGES, len(data) - start)
                if self._ended.is_set() or advise(ctypes.addressof(held) + start, size, POPULATE_READ):
                    return

    def wait(self) -> None:
        """Waits until all are entered."""
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """Waits for the call that is under way."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._maps.clear()
