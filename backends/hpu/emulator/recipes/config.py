"""Parser of ``PT_HPU_RECIPE_CACHE_CONFIG`` for an emulated card: where recipes are stored between starts.

Torch-free; the bridge's list of variables explains the three fields (docs/hpu-internals.md). This is the plug-in's own
reader, emulated, so it shares nothing with ``start/recipe_cache.py``, which checks the variable for the
plug-in: a mistake there shows here, as it would on a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.errors import StartupError

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
YES, NO = ("true", "1"), ("false", "0", "")
FIELDS = 3


@dataclass(frozen=True)
class RecipeCacheConfig:
    """The values of the variable.

    Args:
        folder: where recipes are stored; None: nowhere.
        clear: True if the folder is emptied at start.
        megabytes: maximum size of the folder; 0: no limit.
    """

    folder: Path | None
    clear: bool = False
    megabytes: int = 0


def read(environ: Mapping[str, str]) -> RecipeCacheConfig:
    """Parses the variable; without it there is no cache.

    Raises:
        StartupError: the value cannot be parsed; one line.
    """
    text = environ.get(VARIABLE, "")
    path, clear, size = ([f.strip() for f in text.split(",")] + ["", "", ""])[:FIELDS]
    if clear.lower() not in YES + NO or not (size or "0").isdigit():
        raise StartupError(f"{VARIABLE}={text!r} is no FOLDER,DELETE,MEGABYTES, such as /var/recipes,false,16384.")
    return RecipeCacheConfig(Path(path) if path else None, clear.lower() in YES, int(size or 0))
