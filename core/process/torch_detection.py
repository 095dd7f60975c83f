"""Determines the installed torch from its files, and prepares a process before its first import of torch.

Some settings depend on torch's version. A device's plug-in reads its variables once, while it is imported, and torch
may import it by itself. So the variables are set first: by the server for the engine that it starts, and by the engine,
each rank and an offline ``LLM`` for themselves. The device's package defines which variables it needs; ``core.devices``
finds it by name. Torch-free.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from importlib import import_module, metadata, util
from pathlib import Path

from trencadis.core import devices
from trencadis.core.errors import StartupError

LEAST = (2, 6)
"""The oldest supported torch; pyproject.toml has the same bounds."""

NEWEST = (2, 13)
"""The newest torch that was tested."""

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Unless this variable is 0, torch imports every installed device plug-in together with itself."""


@dataclass(frozen=True)
class TorchBuild:
    """An installed torch.

    Args:
        version: the text of ``torch.__version__``, such as ``2.13.0+cpu``.
        folder: its package folder; "" if only its metadata is found.
    """

    version: str
    folder: str = ""

    @property
    def numbers(self) -> tuple[int, int] | None:
        """(major, minor); None if the version cannot be parsed."""
        return numbers(self.version)


def numbers(version: str | None) -> tuple[int, int] | None:
    """Returns (major, minor) of a version such as ``2.5.1a0+git6fc067b``; None if it cannot be parsed."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def find_torch() -> TorchBuild | None:
    """Returns the torch that ``import torch`` would load, or has loaded; None if there is none."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    folder = package_folder("torch")
    if loaded is not None:
        return TorchBuild(str(loaded), folder)
    if folder:
        try:
            text = Path(folder, "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        said = re.search(r"""^__version__\s*(?::[^=]*)?=\s*["']([^"']+)["']""", text, re.MULTILINE)
        if said:
            return TorchBuild(said[1], folder)
    try:
        return TorchBuild(metadata.version("torch"), folder)
    except metadata.PackageNotFoundError:
        return None


def package_folder(name: str) -> str:
    """Returns the folder of an importable package, without importing it; "" if there is none."""
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return places[0] if places else ""


def check_version(found: TorchBuild | None) -> str:
    """Returns a message about a torch that is newer than the tested ones, else "".

    Raises:
        StartupError: there is no torch, or one that is too old.
    """
    if found is None:
        raise StartupError(
            f"torch is not installed in {sys.prefix}: `pip install 'trencadis[cpu]'`, or in a container with a torch "
            "of its own, `make serve` or its own Python (docs/getting-started.md)"
        )
    have = found.numbers
    if have is not None and have < LEAST:
        raise StartupError(
            f"torch {found.version} is older than {_format_version(LEAST)}, the oldest that Trencadis runs on: take a "
            f"newer "
            "one; a card's container brings its own, so start from that of a newer release (docs/getting-started.md)"
        )
    if have is not None and have > NEWEST:
        return f"torch {found.version} is newer than {_format_version(NEWEST)}, the newest that was tested"
    return ""


def _format_version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def import_torch() -> None:
    """Imports torch.

    Raises:
        StartupError: torch or an installed device plug-in cannot be loaded; one line.
    """
    try:
        import torch  # noqa: F401
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())[:300]
        plugin = isinstance(error, RuntimeError) and "backend extension" in str(error)
        what = "a device plug-in that torch imports by itself" if plugin else "torch"
        hint = f"{AUTOLOAD}=0 keeps it out" if plugin else "install it again"
        raise StartupError(f"{what} cannot be loaded ({type(cause).__name__}: {said}): {hint}") from None


def prepare_device_env(
    asked: str, environ: MutableMapping[str, str] | None = None, rank: int = 0, world: int = 1
) -> devices.DeviceEnv:
    """Prepares ``environ`` (None: this process's own) for ``--device ASKED``; returns the changes and messages.

    Variables set by the user are kept or refused, never replaced. A second call changes nothing.

    Raises:
        StartupError: the device cannot start with this torch, plug-in or variable; one line.
    """
    env = os.environ if environ is None else environ
    note = check_version(find_torch())
    name = devices.likely(asked)
    module = devices.SETTLERS.get(name, "")
    found = devices.DeviceEnv()
    if module:
        found = import_module(module).settle(env, devices.parse(asked)[1] if asked != "auto" else 0, rank, world)
    variables = dict(found.variables)
    late = env is os.environ and "torch" in sys.modules
    if name in devices.BUILT and not late and not env.get(AUTOLOAD):
        # Built-in backends import what they need themselves, where a failure can be explained.
        variables[AUTOLOAD] = "0"
    env.update(variables)
    for gone in found.removed:
        env.pop(gone, None)
    return devices.DeviceEnv(variables, (note, *found.lines) if note else tuple(found.lines), found.removed)
