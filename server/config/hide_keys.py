"""Hides keys of the command line from ``ps``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from trencadis.server.config.flags import get_flag_table
from trencadis.server.config.resolve_settings import Settings

ARG_START = 45
"""Index of a field of /proc/self/stat, counted after the name: the address of the command line in memory."""
LONG = 4
"""Shortest key that is also masked inside words."""


def hide_keys(settings: Settings) -> Iterator[str]:
    """Masks keys that were passed as flags; yields a warning for each such flag."""
    for flag in get_flag_table().values():
        if flag.secret and settings.sources.get(flag.name) == "flag":
            value = getattr(settings.engine if flag.owner == "engine" else settings.server, flag.name)
            mask([value] if isinstance(value, str) else value)
            yield (
                f"everybody on this machine could read {flag.written} until now, and shell histories and service files "
                f"keep it: set {flag.env[0]} or use a file of --config instead."
            )


def mask(keys: Iterable[str]) -> None:
    """Overwrites ``keys`` with asterisks in this process's arguments; does nothing if the system hides those.

    Linux shows the memory that held the arguments at the start, so this changes that memory; ``sys.argv`` is a copy.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        shown = Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return
    start = int(fields[ARG_START])
    if not start or not shown or ctypes.string_at(start, len(shown)) != shown:
        return
    for key in keys:
        for at in _find_key(shown, os.fsencode(key)):
            ctypes.memset(start + at, ord("*"), len(os.fsencode(key)))


def _find_key(shown: bytes, key: bytes) -> Iterator[int]:
    """Yields the offsets of ``key``: as a whole word, after =, or anywhere if it is too long for a chance match."""
    at = shown.find(key) if key else -1
    while at >= 0:
        before, after = shown[at - 1 : at], shown[at + len(key) : at + len(key) + 1]
        if len(key) >= LONG or (before in (b"\0", b"=") and after in (b"\0", b"")):
            yield at
        at = shown.find(key, at + len(key))
