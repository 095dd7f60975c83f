"""Keys that were given on the command line, taken out of what ``ps`` shows of this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from trencadis.server.config.flags import table
from trencadis.server.config.settings import Settings

ARG_START = 45
"""Field of /proc/self/stat behind the name: where the command line lies in this process's memory."""
LONG = 4
"""Characters from which on a key is also looked for inside of words."""


def hide_keys(settings: Settings) -> Iterator[str]:
    """Masks them, and yields a line about each flag that brought some."""
    for flag in table().values():
        if flag.secret and settings.sources.get(flag.name) == "flag":
            value = getattr(settings.engine if flag.owner == "engine" else settings.server, flag.name)
            mask([value] if isinstance(value, str) else value)
            yield (
                f"{flag.written} can be read by everybody on this machine until it is masked here, and stays in shell "
                f"histories and service files: {flag.env[0]} or a file of --config keeps it out of them."
            )


def mask(keys: Iterable[str]) -> None:
    """Overwrites ``keys`` by asterisks in this process's own arguments; where the system hides those, nothing happens.

    Linux shows the memory in which the arguments came, so that is what changes; ``sys.argv`` is a copy.
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
        for at in _places(shown, os.fsencode(key)):
            ctypes.memset(start + at, ord("*"), len(os.fsencode(key)))


def _places(shown: bytes, key: bytes) -> Iterator[int]:
    """Where ``key`` begins: as a word, behind a =, or anywhere if it is long enough to be no accident."""
    at = shown.find(key) if key else -1
    while at >= 0:
        before, after = shown[at - 1 : at], shown[at + len(key) : at + len(key) + 1]
        if len(key) >= LONG or (before in (b"\0", b"=") and after in (b"\0", b"")):
            yield at
        at = shown.find(key, at + len(key))
