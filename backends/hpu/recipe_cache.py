"""``PT_HPU_RECIPE_CACHE_CONFIG``: where the bridge keeps compiled recipes, so that a second start compiles nothing.

Torch-free; what the three fields mean stands in the bridge's list of variables (docs/hpu-contract.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.errors import StartupError
from trencadis.core.memory import measured

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
MEGABYTES = 16384
"""Size of the default folder; the oldest recipes go first."""

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
