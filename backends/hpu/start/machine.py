"""Finds the Gaudis of this machine, and which of them this process may use. Torch-free; reads files, uses no
library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trencadis.core.errors import StartupError

VENDOR = "0x1da3"
ROOT = "TRENCADIS_MACHINE_ROOT"
VISIBLE = "HABANA_VISIBLE_MODULES"
GIVEN = "HABANA_VISIBLE_DEVICES"
MODULE_ID = "HLS_MODULE_ID"
LAUNCHED = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
"""torchrun's and MPI's variables of a process's local rank, which the plug-in takes for a card's number."""

WORLD_SIZE = "WORLD_SIZE"
"""The plug-in leaves memory for HCCL out of its pool where this names more than one rank as it opens the card."""

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


def find(environ: Mapping[str, str]) -> Machine:
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
