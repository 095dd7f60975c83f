"""``PT_HPU_RECIPE_CACHE_CONFIG`` as an emulated card reads it: where recipes are kept between starts.

Torch-free; what the three fields mean stands in the bridge's list of variables (docs/hpu-internals.md). It stands for
the plug-in's own reader, so it shares nothing with ``start/recipe_cache.py``, which checks the variable for the
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
    """The variable as values.

    Args:
        folder: None: no recipe is kept.
        clear: the folder is emptied at start.
        megabytes: most that it holds; 0: no limit.
    """

    folder: Path | None
    clear: bool = False
    megabytes: int = 0


def read(environ: Mapping[str, str]) -> RecipeCacheConfig:
    """The variable, or no cache where it is unset.

    Raises:
        StartupError: a value that cannot be read, in one line.
    """
    text = environ.get(VARIABLE, "")
    path, clear, size = ([f.strip() for f in text.split(",")] + ["", "", ""])[:FIELDS]
    if clear.lower() not in YES + NO or not (size or "0").isdigit():
        raise StartupError(f"{VARIABLE}={text!r} is no FOLDER,DELETE,MEGABYTES, such as /var/recipes,false,16384.")
    return RecipeCacheConfig(Path(path) if path else None, clear.lower() in YES, int(size or 0))
