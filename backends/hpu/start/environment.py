"""What the plug-in must find in the environment when it is imported, and which card this process shall have.

Torch-free and pure, so that the parent can settle it before it starts a worker: the plug-in reads these variables once,
while it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import trencadis.backends.hpu.recipe_cache as recipe_cache
from trencadis.core.errors import StartupError

PLUGIN = "habana-torch-plugin"
HABANA_VENDOR = "0x1da3"
LAST_LAZY = (1, 23)
"""Newest plug-in whose documents still offer lazy mode; later ones get compile mode unless PT_HPU_LAZY_MODE is set."""

SWITCH = "TRENCADIS_HPU_EMULATOR"
REAL, EMULATED = "real", "emulated"
TRUE, FALSE = ("true", "t", "1", "yes", "y", "on"), ("false", "f", "0", "no", "n", "off")


def plugin_version() -> str | None:
    """Version of the installed plug-in, without importing it."""
    return _version(PLUGIN)


def torch_version() -> str | None:
    """Version of torch, without importing it."""
    return _version("torch")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gaudi_present(root: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a Gaudi is plugged in: a PCI device of Habana Labs."""
    try:
        return any((d / "vendor").read_text().strip() == HABANA_VENDOR for d in root.iterdir())
    except OSError:
        return False


def choose(environ: Mapping[str, str], present: bool, plugin: str | None) -> str:
    """``real`` or ``emulated``.

    Raises:
        StartupError: a Gaudi without its plug-in, or the emulator forbidden where there is nothing else.
    """
    text = environ.get(SWITCH, "").strip().lower()
    if text in TRUE:
        return EMULATED
    if text and text not in FALSE:
        raise StartupError(f"{SWITCH}={environ[SWITCH]!r} is neither true ({' '.join(TRUE)}) nor false.")
    if present and plugin is None:
        raise StartupError(
            f"a Gaudi is present and its PyTorch plug-in is not installed: pip install {PLUGIN} (the version of the "
            f"driver), or set {SWITCH}=1 to emulate one"
        )
    if present:
        return REAL
    if text:
        raise StartupError(f"no Gaudi is present and {SWITCH}={environ[SWITCH]} forbids the emulator: unset it")
    return EMULATED


def release(plugin: str | None) -> tuple[int, int] | None:
    """The Gaudi release that a plug-in belongs to: ``1.23.1.25`` is of 1.23; None where it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", plugin or "")
    return (int(found[1]), int(found[2])) if found else None


def gaudis_torch(torch: str | None) -> bool:
    """Whether torch is Gaudi's own build: ``2.9.0+hpu_1.23.1-25.git8598e6d``, once ``2.5.1a0+git6fc067b``."""
    local = (torch or "").partition("+")[2].lower()
    return re.match(r"hpu(?![a-z])|git", local) is not None


def lazy_offered(plugin: str | None, torch: str | None) -> bool:
    """Whether the plug-in can run in lazy mode: an old enough one over Gaudi's own build of torch."""
    found = release(plugin)
    return found is not None and found <= LAST_LAZY and gaudis_torch(torch)


def lazy_ahead(environ: Mapping[str, str]) -> bool:
    """Whether a worker with this environment will run in lazy mode, also before anything is settled."""
    asked = environ.get("PT_HPU_LAZY_MODE")
    plugin = plugin_version()
    if asked or plugin is None or environ.get(SWITCH, "").strip().lower() in TRUE or not gaudi_present():
        return asked != "0"
    return lazy_offered(plugin, torch_version())


def check_mode(environ: Mapping[str, str]) -> None:
    """Raises StartupError for a PT_HPU_LAZY_MODE that parts of the plug-in read as text and others as a number."""
    value = environ.get("PT_HPU_LAZY_MODE", "")
    if value not in ("", "0", "1"):
        raise StartupError(f"PT_HPU_LAZY_MODE={value!r}: 0 or 1 (torch.compile, or lazy mode with graphs)")


def unusable(why: str, environ: Mapping[str, str]) -> str:
    """The line about a plug-in that does not load, or lacks what every release of it has."""
    plugin, torch = plugin_version(), torch_version()
    lazy = environ.get("PT_HPU_LAZY_MODE") == "1" and not gaudis_torch(torch)
    hint = "PT_HPU_LAZY_MODE=1 needs Gaudi's own torch: unset it, or install that; " if lazy else ""
    return (
        f"the Gaudi plug-in cannot be used ({why}): {hint}{PLUGIN} {plugin} and torch {torch} must be of one Gaudi "
        f"release, as in Intel's containers; {SWITCH}=1 emulates a card instead"
    )


def settle(environ: Mapping[str, str], plugin: str | None, torch: str | None) -> dict[str, str]:
    """Variables to add to a worker's environment before it imports the plug-in; what the user set is left alone.

    Lazy mode (HPU graphs) where the plug-in offers it. Collectives inside graphs need the lazy ones. Inputs and
    outputs of graphs must stay where they are between replays, which the tensor cache does.
    """
    asked = environ.get("PT_HPU_LAZY_MODE") or ("1" if lazy_offered(plugin, torch) else "0")
    wanted = {
        "PT_HPU_LAZY_MODE": asked,
        "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true",
        "PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "0",
        recipe_cache.VARIABLE: recipe_cache.default(environ),
    }
    if asked == "0":
        wanted["FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"] = "1"
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def emulated(environ: Mapping[str, str]) -> dict[str, str]:
    """The same for a worker that emulates: lazy unless the user says 0, and no plug-in that loads itself."""
    wanted = {"PT_HPU_LAZY_MODE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if environ.get("PT_HPU_LAZY_MODE") == "0":
        wanted[recipe_cache.VARIABLE] = recipe_cache.default(environ)
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def clash(environ: Mapping[str, str], lazy: bool) -> str | None:
    """One line where the imported plug-in runs in another mode than the environment says."""
    asked = environ.get("PT_HPU_LAZY_MODE", "1") != "0"
    if asked == lazy:
        return None
    name = {True: "lazy", False: "eager"}
    return (
        f"PT_HPU_LAZY_MODE={environ.get('PT_HPU_LAZY_MODE', '')} asks for {name[asked]} mode and the plug-in runs in "
        f"{name[lazy]} mode: it was imported before the variable was set"
    )
