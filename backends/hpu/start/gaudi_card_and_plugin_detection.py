"""Detects the Gaudis of this machine, which of them this process may use, and the installed plug-in and torch.

Torch-free. Everything is read from files, so that nothing is imported before its variables are set. The rules that say
whether plug-in and torch match are those of the plug-in's own ``__init__`` (docs/hpu-internals.md), which would end in
a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from trencadis.core.errors import StartupError
from trencadis.core.process import torch_detection

VENDOR = "0x1da3"
ROOT = "TRENCADIS_MACHINE_ROOT"
VISIBLE = "HABANA_VISIBLE_MODULES"
GIVEN = "HABANA_VISIBLE_DEVICES"
MODULE_ID = "HLS_MODULE_ID"
LAUNCHED = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
"""torchrun's and MPI's variables of a process's local rank, which the plug-in takes for a card's number."""

WORLD_SIZE = "WORLD_SIZE"
"""The plug-in leaves memory for HCCL out of its pool where this names more than one rank as it opens the card."""

HCCL_ALLOWANCE = "PT_HCCL_MEMORY_ALLOWANCE_MB"
"""How much that is, in MiB."""

MOST = 8
"""Maximum number of cards of one machine that the plug-in can number."""


@dataclass(frozen=True)
class Machine:
    """The cards of a machine.

    Args:
        cards: PCI devices of the vendor. A container shows them even if it may use none of them.
        nodes: device files that a process could open.
        modules: ids by which ``HABANA_VISIBLE_MODULES`` names cards, ascending; empty if the driver does not report
        them.
        driver: version of the driver, or "".
    """

    cards: int = 0
    nodes: int = 0
    modules: tuple[int, ...] = ()
    driver: str = ""

    def problem(self) -> str:
        """Returns why no card can be opened although there are some; "" if nothing is known to prevent it."""
        if not self.cards or self.nodes:
            return ""
        if self.driver:
            return (
                "its device files are not in /dev: start the container with --runtime=habana and "
                f"-e {GIVEN}=all, or give it --device /dev/accel"
            )
        return "its driver is not loaded: load habanalabs (`sudo modprobe habanalabs`), or start the container with it"


def find_machine(environ: Mapping[str, str]) -> Machine:
    """Finds the cards of this machine; ``TRENCADIS_MACHINE_ROOT`` names a folder to look in instead of ``/``."""
    root = Path(environ.get(ROOT) or "/")
    accels = [p.name for p in root.glob("dev/accel/accel[0-9]*")]
    nodes = len(accels) + sum(re.fullmatch(r"hl\d+", p.name) is not None for p in root.glob("dev/hl[0-9]*"))
    # A container sees all of the host's cards in sysfs; those with a device file are its own.
    said = (_text(root / f"sys/class/accel/{name}/device/module_id") for name in accels)
    modules = {int(text) for text in said if text.isdecimal()}
    driver = _text(root / "sys/module/habanalabs/version")
    if not driver and (root / "sys/module/habanalabs").is_dir():
        driver = "unknown"
    cards = sum(_text(p) == VENDOR for p in root.glob("sys/bus/pci/devices/*/vendor"))
    return Machine(cards, nodes, tuple(sorted(modules)), driver)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def visible(environ: Mapping[str, str], machine: Machine) -> tuple[int, ...] | None:
    """Returns the module ids in ``HABANA_VISIBLE_MODULES``, in its order; None if it is unset.

    Raises:
        StartupError: the plug-in would fail an assertion on the text, or a card does not exist.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    known = f"; this machine has {', '.join(map(str, machine.modules))}" if machine.modules else ""
    if not all(part.isdecimal() for part in parts):
        raise StartupError(f"{VISIBLE}={text!r}: module ids with commas between, such as 0,1; unset it for all{known}")
    ids = tuple(map(int, parts))
    if len(set(ids)) < len(ids) or len(ids) > MOST:
        raise StartupError(f"{VISIBLE}={text!r}: each card once, and {MOST} at most{known}")
    # a container with some of the cards may number them differently
    whole = machine.modules and machine.nodes == machine.cards
    missing = [i for i in ids if whole and i not in machine.modules]
    if missing:
        raise StartupError(f"{VISIBLE}={text!r}: there is no module {missing[0]}{known}")
    return ids


def usable(environ: Mapping[str, str], machine: Machine) -> tuple[int, str]:
    """Returns how many cards may be used, and the same in words."""
    named = visible(environ, machine)
    if named is not None:
        return len(named), f"{VISIBLE}={environ[VISIBLE]} names {len(named)}"
    return machine.nodes, f"there {'is' if machine.nodes == 1 else 'are'} {machine.nodes}"


def hccl_bytes(environ: Mapping[str, str]) -> int:
    """Returns the bytes that the plug-in's pool leaves to HCCL's buffers on a card that is one of several ranks.

    Raises:
        StartupError: ``PT_HCCL_MEMORY_ALLOWANCE_MB`` is no number.
    """
    text = environ.get(HCCL_ALLOWANCE, "").strip() or "384"
    if not text.isdecimal() or len(text) > 9:
        raise StartupError(f"{HCCL_ALLOWANCE}={text[:40]!r}: a whole number of MiB is needed; 384 where it is unset.")
    return int(text) << 20


def check_index(environ: Mapping[str, str], machine: Machine, index: int, world: int) -> None:
    """Raises StartupError if ``--device`` or ``--tensor-parallel-size`` needs more cards than may be used."""
    count, why = usable(environ, machine)
    if world > count:
        raise StartupError(f"--tensor-parallel-size {world} needs {world} cards and {why}.")
    if index >= count:
        raise StartupError(f"--device hpu:{index}: card {index} is asked for and {why}, from 0.")


def check_module(environ: Mapping[str, str], machine: Machine, index: int, world: int) -> None:
    """Raises StartupError if ``HLS_MODULE_ID`` names another card than ``index``: the plug-in would open that one.

    A process with the default card opens the one that is named.
    """
    text = environ.get(MODULE_ID, "")
    if not text or (index == 0 and world == 1):
        return
    ids = visible(environ, machine) or tuple(range(MOST))
    if index >= len(ids) or text != str(ids[index]):
        raise StartupError(
            f"{MODULE_ID}={text} names another card than card {index}: unset it; a process that has opened a card "
            "keeps it"
        )


def variables(environ: Mapping[str, str], machine: Machine, index: int, world: int) -> dict[str, str]:
    """Returns ``HABANA_VISIBLE_MODULES`` where it is needed: on a machine with fewer than eight cards the plug-in finds
    only the first one by itself.
    """
    if environ.get(VISIBLE) is not None or environ.get(MODULE_ID) or machine.nodes >= MOST or not machine.modules:
        return {}
    return {VISIBLE: ",".join(map(str, machine.modules))} if world > 1 or index else {}


def describe(environ: Mapping[str, str], machine: Machine) -> str:
    """Describes the machine's cards, such as ``8 cards (modules 0-7), driver 1.24.1, HABANA_VISIBLE_MODULES=0,1``."""
    said = [f"{machine.cards} cards" if machine.cards != 1 else "1 card"]
    if machine.nodes != machine.cards:
        said[0] += f", {machine.nodes} of them here"
    if machine.modules:
        ids = machine.modules
        whole = len(ids) > 1 and ids == tuple(range(ids[0], ids[-1] + 1))
        named = f"{ids[0]}-{ids[-1]}" if whole else ", ".join(map(str, ids))
        said[0] += f" (module{'s' if len(ids) > 1 else ''} {named})"
    if machine.driver:
        said.append(f"driver {machine.driver}")
    said += [f"{name}={environ[name]}" for name in (GIVEN, VISIBLE, MODULE_ID) if environ.get(name)]
    return ", ".join(said)


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
        wanted, have = torch_detection.numbers(self.built_for), torch_detection.numbers(self.torch)
        if self.torch is None:
            return f"{PLUGIN} {self.plugin} is installed and torch is not: {remedy(self)}"
        if wanted is not None and have is not None and wanted != have:
            return (
                f"{PLUGIN} {self.plugin} was built for torch {self.built_for} and torch {self.torch} is installed: "
                f"{remedy(self)}"
            )
        return ""


def find_stack() -> Stack:
    """Finds the stack of this Python without importing it."""
    torch = torch_detection.find_torch()
    folder = torch_detection.package_folder(MODULE)
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
    return torch_detection.numbers(plugin)


class PointRelease(NamedTuple):
    """A release of the plug-in without its build number."""

    major: int
    minor: int
    patch: int


def point_release(plugin: str | None) -> PointRelease | None:
    """Returns 1.24.1 for ``1.24.1.482``; None if the version cannot be parsed."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", plugin or "")
    return PointRelease(int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


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
    found = torch_detection.numbers(torch)
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
        point = PointRelease(*max(TORCH_OF))
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
    have = torch_detection.numbers(torch)
    known = [r for r, of in TORCH_OF.items() if have is not None and torch_detection.numbers(of) == have]
    return ".".join(map(str, max(known))) if known else ""
