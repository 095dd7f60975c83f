"""Sets a process up for a Gaudi before torch is imported (``core.devices.SETTLERS``). Torch-free.

Also chooses the folder in which the plug-in keeps compiled recipes between starts (``PT_HPU_RECIPE_CACHE_CONFIG``).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection, gaudi_mode_and_env
from trencadis.core.devices import DeviceEnv
from trencadis.core.errors import StartupError
from trencadis.core.memory import graph_measurement_cache

CONFIG = "PT_HPU_RECIPE_CACHE_CONFIG"
CACHE = "TRENCADIS_CACHE"
MOST_MB = 10_240
"""Default limit of a rank's folder in MB; the plug-in deletes the oldest recipes above it."""

LEAST_MB = 512
"""With less free space (MiB) no recipes are stored: a full disk would leave half-written files."""

RECIPE, METADATA = ".recipe", ".metadata"


@dataclass(frozen=True)
class RecipeCache:
    """A decision: the variable's value ("" leaves it unchanged) and lines for the user.

    Args:
        off: True: the variable is removed: the plug-in ends for an empty text, and takes an empty folder for one called
        0.
    """

    value: str = ""
    lines: tuple[str, ...] = ()
    off: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """Variables to add to the environment."""
        return {CONFIG: self.value} if self.value else {}

    @property
    def removed(self) -> tuple[str, ...]:
        """Variables to remove from the environment."""
        return (CONFIG,) if self.off else ()


def settle_recipe_cache(environ: Mapping[str, str], stack: str, rank: int = 0) -> RecipeCache:
    """Checks the user's folder; without one, prepares a default folder for each stack and rank.

    Args:
        stack: versions of plug-in and torch; recipes of one are of no use to another.

    Raises:
        StartupError: a value for which the plug-in would end the process.
    """
    home = graph_measurement_cache.folder(environ).parent / "recipes"
    text = environ.get(CONFIG)
    # the default folder comes from the parent, which has another rank
    if text is not None and not text.startswith(f"{home}/"):
        return _users(text)
    folder = home / stack.replace("/", "-").replace(",", "-") / f"rank{rank}"
    why = _unwritable(folder)
    if why:
        return RecipeCache(lines=(
            f"recipes are not kept: {folder} {why}; set {CACHE} to a folder that can be written, or "
            f"{CONFIG}=FOLDER,false,{MOST_MB}; until then every start compiles again",
        ), off=True)  # fmt: skip
    if "," in str(folder):
        line = f"recipes are not kept: {folder} has a comma in its name, which {CONFIG} cannot hold"
        return RecipeCache(lines=(line,), off=True)
    lines = _remove_broken_recipes(folder)
    free = shutil.disk_usage(folder).free >> 20
    if free < LEAST_MB:
        needed = f"{free} MiB left and {LEAST_MB} are needed"
        line = f"recipes are not kept: {folder} has {needed}; free some, or set {CACHE}"
        return RecipeCache(lines=(*lines, line), off=True)
    return RecipeCache(f"{folder},false,{min(MOST_MB, free // 2)}", lines)


def _users(text: str) -> RecipeCache:
    """Checks ``FOLDER[,DELETE[,MEGABYTES[,...]]]``."""
    parts = text.split(",")
    folder, delete, size = (*parts, "", "")[:3]
    form = (
        f"{CONFIG}={text!r}: FOLDER, whether to empty it first, megabytes, such as /var/cache/recipes,false,{MOST_MB}"
    )
    if (
        len(parts) > 4
        or delete.strip().lower() not in ("", "true", "false", "0", "1")
        or (not size.strip().isdecimal() and size)
    ):
        raise StartupError(form)
    if not folder:
        return RecipeCache(lines=(f"{CONFIG}={text!r} keeps no recipes: every start compiles again",), off=True)
    cache_folder = Path(folder)
    if cache_folder.exists() and not cache_folder.is_dir():
        raise StartupError(f"{CONFIG}: {folder} is no folder; the plug-in would end the engine")
    if not cache_folder.exists():
        try:
            cache_folder.mkdir(parents=True)
        except OSError as error:
            raise StartupError(
                f"{CONFIG}: {folder} cannot be made ({error.strerror}); name a folder that can, or unset it"
            ) from None
    why = _unwritable(cache_folder)
    if why:
        return RecipeCache(lines=(f"{CONFIG}: {folder} {why}: recipes in it are used, new ones are not kept",))
    free = shutil.disk_usage(cache_folder).free >> 20
    if free < LEAST_MB:
        return RecipeCache(
            lines=(f"{CONFIG}: {folder} has {free} MiB left: recipes that do not fit are compiled again",)
        )
    return RecipeCache()


def _unwritable(folder: Path) -> str:
    """Returns why no file can be made in ``folder``, which is created if missing; "" if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"0" * 4096)
            probe.flush()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return ""


def _remove_broken_recipes(folder: Path) -> tuple[str, ...]:
    """Removes recipe files that are empty or lack their other half, as left by an interrupted write."""
    removed = 0
    for path in folder.glob("*"):
        if path.suffix not in (RECIPE, METADATA):
            continue
        other = path.with_suffix(METADATA if path.suffix == RECIPE else RECIPE)
        try:
            # Metadata without a recipe is complete: a graph without work has no recipe.
            broken = path.stat().st_size == 0 or (path.suffix == RECIPE and not other.exists())
            if broken:
                os.unlink(path)
                removed += 1
        except OSError:
            continue
    return (f"{removed} files of unfinished recipes were removed from {folder}",) if removed else ()


def settle(environ: Mapping[str, str], index: int = 0, rank: int = 0, world: int = 1) -> DeviceEnv:
    """Returns the variables for a process that opens card ``index`` + ``rank``, and the lines of its banner.

    Raises:
        StartupError: see ``gaudi_mode_and_env.find_capability`` and ``settle_recipe_cache``.
    """
    found = gaudi_mode_and_env.find_capability(environ, index + rank, world)
    if not found.real:
        variables = gaudi_mode_and_env.emulated_variables(environ)
        if {**environ, **variables}[gaudi_mode_and_env.MODE] == "1":
            return DeviceEnv(variables, found.lines())
        kept = settle_recipe_cache(environ, "emulated", rank)
        return DeviceEnv({**variables, **kept.variables}, (*found.lines(), *kept.lines), kept.removed)
    kept = settle_recipe_cache(environ, f"{found.stack.plugin}-torch-{found.stack.torch}", rank)
    variables = {
        **gaudi_mode_and_env.settle(environ, found.lazy),
        **gaudi_card_and_plugin_detection.variables(environ, found.machine, index + rank, world),
        **kept.variables,
    }
    return DeviceEnv(variables, (*found.lines(), *kept.lines), kept.removed)
