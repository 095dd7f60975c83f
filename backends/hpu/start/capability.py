"""The stack that a Gaudi process runs on, found before torch is imported: versions, mode, cards, and what is
missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trencadis.backends.hpu.start import environment, machine, software_stack
from trencadis.backends.hpu.start.machine import Machine
from trencadis.backends.hpu.start.software_stack import PLUGIN, Stack
from trencadis.core.errors import StartupError


@dataclass(frozen=True)
class Capability:
    """One process's Gaudi.

    Args:
        real: True for a card, False for the emulator.
        lazy: True for lazy mode (graphs), else compile mode.
        why: the reason for the mode.
        missing: what this stack or mode lacks, in words for the user.
        cards: the cards and the variables that select among them, in words.
    """

    real: bool
    stack: Stack
    machine: Machine
    lazy: bool
    why: str
    missing: tuple[str, ...]
    cards: str

    @property
    def mode(self) -> str:
        """``lazy mode`` or ``compile mode``."""
        return "lazy mode" if self.lazy else "compile mode"

    def rows(self) -> list[tuple[str, str]]:
        """Returns (what, value) rows for ``trencadis check-hpu``."""
        build = "Gaudi's build" if self.stack.own else "upstream"
        rows = [("torch", f"{self.stack.torch} ({build})" if self.stack.torch else "not installed")]
        rows += [("plug-in", f"{PLUGIN} {self.stack.plugin}" if self.stack.plugin else "not installed")]
        rows += [("mode", f"{self.mode} ({self.why})"), ("cards", self.cards)]
        return [*rows, *(("missing", text) for text in self.missing)]

    def lines(self) -> tuple[str, ...]:
        """Returns the lines of the startup banner."""
        if not self.real:
            return (f"hpu: emulated, {self.mode} ({self.why})",)
        plugin = f"{PLUGIN} {self.stack.plugin}, torch {self.stack.torch}"
        first = f"hpu: {plugin}, {self.mode} ({self.why}), {self.cards}"
        return (first, *(f"hpu: without {text}" for text in self.missing))


def find(environ: Mapping[str, str], index: int = 0, world: int = 1) -> Capability:
    """Examines this machine and this Python; imports nothing.

    Raises:
        StartupError: one line about a stack, a mode or a card that cannot be used.
    """
    environment.check_mode(environ)
    here, found = machine.find(environ), software_stack.find()
    if environment.choose(environ, here, found) == environment.EMULATED:
        asked = environment.requested_mode(environ)
        lazy = asked is not False
        environment.refuse(environ, lazy, world)
        why = "as asked" if asked is not None else environment.GRAPHS
        return Capability(False, found, here, lazy, why, (), "emulated")
    lazy, why = environment.pick_mode(environ, found)
    running = loaded_mode()
    if running is not None and running != lazy:
        if environment.requested_mode(environ) is not None:
            raise StartupError(environment.mode_conflict({environment.MODE: "1" if lazy else "0"}, running) or "")
        lazy, why = running, "the plug-in was imported before Trencadis could ask for lazy mode; set PT_HPU_LAZY_MODE"
    environment.refuse(environ, lazy, world)
    machine.check_index(environ, here, index, world)
    return Capability(True, found, here, lazy, why, missing(lazy, found, here), machine.describe(environ, here))


def missing(lazy: bool, found: Stack, here: Machine) -> tuple[str, ...]:
    """Returns what this stack lacks compared with others, in words for the user."""
    lacks = [] if lazy else ["HPU graphs, which exist in lazy mode alone: launches are compiled and not captured"]
    driver, plugin = software_stack.release(here.driver), software_stack.release(found.plugin)
    if driver is not None and plugin is not None and driver != plugin:
        lacks.append(f"a driver of its release: {here.driver} is loaded, and it is of {found.plugin}")
    return tuple(lacks)


def loaded_mode() -> bool | None:
    """Returns True if the plug-in runs in lazy mode; None if nothing in this process has imported it."""
    module: Any = sys.modules.get("habana_frameworks.torch.utils.internal")
    return None if module is None else bool(module.is_lazy())
