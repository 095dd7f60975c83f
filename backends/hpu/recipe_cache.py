"""``PT_HPU_RECIPE_CACHE_CONFIG``: where the bridge keeps compiled recipes, so that a second start compiles nothing.

Torch-free; what the three fields mean stands in the bridge's list of variables (docs/hpu-contract.md).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.errors import StartupError
from trencadis.core.memory import measured

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
MEGABYTES = 16384
"""Size of the default folder; the oldest recipes go first."""

YES, NO = ("true", "1"), ("false", "0", "")
FIELDS = 3
LEAST_FREE = 256 << 20
"""Bytes that must be free where recipes go: a model's take hundreds of megabytes."""


@dataclass(frozen=True)
class RecipeCacheConfig:
    """The variable as values.

    Args:
        folder: None: no recipe is kept.
        clear: the folder is emptied at start.
        megabytes: most that it holds; 0: no limit.
    """

    folder: Path | None
    clear: bool = False
    megabytes: int = 0


def default(environ: Mapping[str, str]) -> str:
    """The value where none is set: a folder beside the measurements of this user, kept from start to start."""
    return f"{measured.folder(environ).parent / 'recipes'},false,{MEGABYTES}"


def read(environ: Mapping[str, str]) -> RecipeCacheConfig:
    """The variable, or no cache where it is unset.

    Raises:
        StartupError: a value that cannot be read, in one line.
    """
    text = environ.get(VARIABLE, "")
    path, clear, size = ([f.strip() for f in text.split(",")] + ["", "", ""])[:FIELDS]
    if clear.lower() not in YES + NO or not (size or "0").isdigit():
        raise StartupError(
            f"{VARIABLE}={text!r} is no FOLDER,DELETE,MEGABYTES, such as /var/recipes,false,{MEGABYTES}."
        )
    return RecipeCacheConfig(Path(path) if path else None, clear.lower() in YES, int(size or 0))


def prepare(environ: MutableMapping[str, str]) -> str | None:
    """Makes the folder before the plug-in looks for it; a line, and no recipe cache, where nothing can be kept there.

    Raises:
        StartupError: a value that cannot be read, in one line.
    """
    folder = read(environ).folder
    if folder is None:
        environ.pop(VARIABLE, None)  # the plug-in refuses an empty text
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe{os.getpid()}"
        probe.write_bytes(b"recipes")
        probe.unlink()
        free = shutil.disk_usage(folder).free
        why = None if free >= LEAST_FREE else f"{free >> 20} MiB are free there"
    except OSError as error:
        why = error.strerror or str(error)
    if why is None:
        return None
    del environ[VARIABLE]
    return f"no recipe is kept in {folder} ({why}): every start compiles again; name a folder with room in {VARIABLE}"
