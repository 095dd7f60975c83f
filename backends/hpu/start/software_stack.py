"""Finds the installed Gaudi plug-in and torch, and whether the two match. Torch-free.

Everything is read from files, so that nothing is imported before its variables are set. The rules are those of the
plug-in's own ``__init__`` (docs/hpu-internals.md), which would end in a traceback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trencadis.core.process import torch_build

PLUGIN = "habana-torch-plugin"
MODULE = "habana_frameworks"

LAST_LAZY = (1, 23)
"""Newest release whose default is lazy mode; later ones use it only with PT_HPU_LAZY_MODE=1."""

COMPILES_FROM = (2, 9)
"""First torch for compile mode: 2.6 and 2.7 trace each layer anew, and cannot trace some launches."""

TORCH_OF = {
    (1, 19, 0): "2.5.1", (1, 20, 0): "2.6.0", (1, 21, 0): "2.6.0", (1, 22, 0): "2.7.1", (1, 23, 0): "2.9.0",
    (1, 24, 0): "2.10.0", (1, 24, 1): "2.11.0", (1, 24, 2): "2.13.0",
}  # fmt: skip
"""Release -> torch that it comes with, valid until the next release in the table."""

UPSTREAM_FROM = (1, 24, 1)
"""First release whose container for upstream torch is known here."""

CONTAINERS = "vault.habana.ai/gaudi-docker"


@dataclass(frozen=True)
class Stack:
    """The installed versions; None: not installed.

    Args:
        plugin: version of the plug-in's package, such as ``1.24.1.482``.
        torch: ``torch.__version__``.
        built_for: the torch that the plug-in was built for, by its own metadata.
        module: True if the plug-in's Python package is present.
    """

    plugin: str | None = None
    torch: str | None = None
    built_for: str | None = None
    module: bool = False

    @property
    def own(self) -> bool:
        """True if torch is Gaudi's own build."""
        return gaudis_torch(self.torch)

    def problem(self) -> str:
        """Returns why the plug-in cannot be used, in a few words that end with the remedy; "" if nothing is known to
        prevent it.
        """
        if self.plugin is None and not self.module:
            return f"its PyTorch plug-in is not installed: {remedy(self)}"
        if self.plugin is None:
            return f"{MODULE} is there without the package {PLUGIN} (half installed): {remedy(self)}"
        if not self.module:
            return f"{PLUGIN} {self.plugin} is listed and its module {MODULE} is gone (half installed): {remedy(self)}"
        wanted, have = torch_build.numbers(self.built_for), torch_build.numbers(self.torch)
        if self.torch is None:
            return f"{PLUGIN} {self.plugin} is installed and torch is not: {remedy(self)}"
        if wanted is not None and have is not None and wanted != have:
            return (
                f"{PLUGIN} {self.plugin} was built for torch {self.built_for} and torch {self.torch} is installed: "
                f"{remedy(self)}"
            )
        return ""


def find() -> Stack:
    """Finds the stack of this Python without importing it."""
    torch = torch_build.find_torch()
    folder = torch_build.package_folder(MODULE)
    torch_folder = Path(folder, "torch") if folder else None
    built_for = None
    if torch_folder is not None:
        try:
            built_for = (torch_folder / "required_version.txt").read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError):
            built_for = None
    return Stack(
        plugin_version(), torch.version if torch else None, built_for,
        torch_folder is not None and (torch_folder / "__init__.py").is_file(),
    )  # fmt: skip


def plugin_version() -> str | None:
    """Returns the version of the installed plug-in, without importing it; None if there is none."""
    try:
        return metadata.version(PLUGIN)
    except metadata.PackageNotFoundError:
        return None


def release(plugin: str | None) -> tuple[int, int] | None:
    """Returns the Gaudi release of a plug-in: ``1.23.1.25`` is of (1, 23); None if the version cannot be parsed."""
    return torch_build.numbers(plugin)


def point_release(plugin: str | None) -> tuple[int, int, int] | None:
    """Returns (1, 24, 1) for ``1.24.1.482``; None if the version cannot be parsed."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", plugin or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def gaudis_torch(torch: str | None) -> bool:
    """Returns True if torch is Gaudi's own build: ``2.9.0+hpu_1.23.1-25.git8598e6d``, or ``2.5.1a0+git6fc067b``."""
    local = (torch or "").partition("+")[2].lower()
    return re.match(r"hpu(?![a-z])|git", local) is not None


def lazy_offered(plugin: str | None, torch: str | None) -> bool:
    """Returns True if lazy mode is the plug-in's default: a release up to ``LAST_LAZY`` with Gaudi's own build of
    torch.
    """
    found = release(plugin)
    return found is not None and found <= LAST_LAZY and gaudis_torch(torch)


def compiles(torch: str | None) -> bool:
    """Returns True if torch's compiler traces every launch as one graph and shares compiled code between equal
    layers.
    """
    found = torch_build.numbers(torch)
    return found is None or found >= COMPILES_FROM


def torch_of(plugin: str | None) -> str:
    """Returns the torch in Gaudi's containers of a plug-in's release; "" for an unknown release."""
    point = point_release(plugin)
    known = [r for r in TORCH_OF if point is not None and r <= point and r[:2] == point[:2]]
    return TORCH_OF[max(known)] if known else ""


def image(plugin: str | None, lazy: bool = False) -> str:
    """Returns the container image of a plug-in's release on Ubuntu 24.04; of the newest release if it is unknown.

    Args:
        lazy: True for the image with Gaudi's own torch, which lazy mode needs.
    """
    point = point_release(plugin)
    if point is None or not torch_of(plugin):
        point = max(TORCH_OF)
    torch = torch_of(".".join(map(str, point)))
    kind = "pytorch-installer" if lazy or point < UPSTREAM_FROM else "pytorch-upstream-installer"
    return f"{CONTAINERS}/{'.'.join(map(str, point))}/ubuntu24.04/habanalabs/{kind}-{torch}"


def remedy(stack: Stack) -> str:
    """Returns what to do if plug-in and torch do not match."""
    of = release_of(stack.torch) if stack.plugin is None else ""
    pinned = f"install {PLUGIN}=={of}.* beside torch {stack.torch}, or " if of else ""
    return f"{pinned}start from the container {image(stack.plugin or of or None)}"


def release_of(torch: str | None) -> str:
    """Returns the Gaudi release that carries a torch, from its version (``+hpu_1.23.1-25...``) or from ``TORCH_OF``;
    else "".
    """
    said = re.search(r"\+hpu[_.-](\d+\.\d+\.\d+)", torch or "")
    if said:
        return said[1]
    have = torch_build.numbers(torch)
    known = [r for r, of in TORCH_OF.items() if have is not None and torch_build.numbers(of) == have]
    return ".".join(map(str, max(known))) if known else ""
