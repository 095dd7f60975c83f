"""The stack that a Gaudi process runs on, and the environment variables that the plug-in needs. Torch-free.

The plug-in reads these variables once, while it is imported; so they are set before, by the parent for the worker that
it starts, and by each process for itself. The stack is found before torch is imported: versions, mode, cards, and what
is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trencadis.backends.hpu.start import gaudi_card_and_plugin_detection
from trencadis.backends.hpu.start.gaudi_card_and_plugin_detection import PLUGIN, Machine, Stack
from trencadis.core.envs import FALSE, TRUE
from trencadis.core.errors import StartupError

SWITCH = "TRENCADIS_HPU_EMULATOR"
REAL, EMULATED = "real", "emulated"

MODE = "PT_HPU_LAZY_MODE"
BRIDGE_MODE = "VLLM_BRIDGE_MODE"
LAZY_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
TENSOR_CACHE_OFF = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
INPUT_REUSE = "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"
WEIGHT_SHARING = "PT_HPU_WEIGHT_SHARING"
SCALE_PATCHING = "RUNTIME_SCALE_PATCHING"
FUSER_THREADS = "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

GRAPHS = "graphs exist in lazy mode alone"


def choose(environ: Mapping[str, str], machine: Machine, stack: Stack) -> str:
    """Returns REAL or EMULATED. The emulator never replaces a card or a plug-in that should be present.

    Raises:
        StartupError: a Gaudi cannot be opened, a plug-in cannot be used or has no card, or the emulator is forbidden
        and there is no Gaudi.
    """
    text = environ.get(SWITCH, "").strip().lower()
    if text in TRUE:
        return EMULATED
    if text and text not in FALSE:
        raise StartupError(f"{SWITCH}={environ[SWITCH]!r} is neither true ({' '.join(TRUE)}) nor false.")
    emulate = f"; {SWITCH}=1 emulates a card instead"
    if machine.cards:
        why = machine.problem() or stack.problem()
        if why:
            raise StartupError(f"a Gaudi is present and {why}{emulate}")
        return REAL
    if text:
        raise StartupError(f"no Gaudi is present and {SWITCH}={environ[SWITCH]} forbids the emulator: unset it")
    if stack.plugin is not None or stack.module:
        raise StartupError(
            f"no Gaudi is present and {PLUGIN} {stack.plugin or 'without metadata'} is installed: start the container "
            f"with --runtime=habana -e HABANA_VISIBLE_DEVICES=all (`hl-smi` shows the cards){emulate}"
        )
    return EMULATED


def check_mode(environ: Mapping[str, str]) -> None:
    """Raises StartupError if PT_HPU_LAZY_MODE is not 0 or 1 (parts of the plug-in read it as text, others as a number),
    or if two variables request different modes.
    """
    value = environ.get(MODE, "")
    if value not in ("", "0", "1"):
        raise StartupError(f"{MODE}={value!r}: 0 or 1 (torch.compile, or lazy mode with graphs)")
    named = environ.get(BRIDGE_MODE, "").lower()
    if named not in ("", "lazy", "eager"):
        raise StartupError(f"{BRIDGE_MODE}={environ[BRIDGE_MODE]!r}: lazy or eager")
    if named and value and (named == "lazy") != (value == "1"):
        raise StartupError(f"{MODE}={value} and {BRIDGE_MODE}={named} ask for two modes at once: unset one of them")


def requested_mode(environ: Mapping[str, str]) -> bool | None:
    """Returns True if the user requests lazy mode, False for compile mode, None if neither variable is set."""
    check_mode(environ)
    value = environ.get(MODE) or {"lazy": "1", "eager": "0"}.get(environ.get(BRIDGE_MODE, "").lower(), "")
    return value == "1" if value else None


def will_be_lazy(environ: Mapping[str, str]) -> bool:
    """Returns True if a process with this environment will run in lazy mode, also before its variables are set."""
    asked = requested_mode(environ)
    if asked is not None:
        return asked
    if (
        environ.get(SWITCH, "").strip().lower() in TRUE
        or not gaudi_card_and_plugin_detection.find_machine(environ).cards
    ):
        return True
    found = gaudi_card_and_plugin_detection.find_stack()
    return found.plugin is None or gaudi_card_and_plugin_detection.lazy_offered(found.plugin, found.torch)


def pick_mode(environ: Mapping[str, str], stack: Stack) -> tuple[bool, str]:
    """Returns (lazy, reason) for an installed plug-in.

    Raises:
        StartupError: lazy mode is requested with a torch in which the plug-in has none, or compile mode with one whose
        compiler is too old.
    """
    asked = requested_mode(environ)
    if asked and not stack.own:
        container = gaudi_card_and_plugin_detection.image(stack.plugin, lazy=True)
        raise StartupError(
            f"{MODE}=1 asks for lazy mode, which needs Gaudi's own build of torch, and torch {stack.torch} is the "
            f"upstream one: unset it (compile mode), or start from the container {container}"
        )
    if asked is False and not gaudi_card_and_plugin_detection.compiles(stack.torch):
        least = ".".join(map(str, gaudi_card_and_plugin_detection.COMPILES_FROM))
        raise StartupError(
            f"{MODE}=0 asks for compile mode, which needs torch {least} or newer, "
            f"and torch {stack.torch} is here: unset it (lazy mode, with graphs)"
        )
    if asked is not None:
        return asked, "as asked"
    if gaudi_card_and_plugin_detection.lazy_offered(stack.plugin, stack.torch):
        return True, GRAPHS
    if stack.own:
        return False, f"the default since release 1.24; {MODE}=1 asks for graphs"
    return False, "upstream torch has no lazy mode"


def refuse(environ: Mapping[str, str], lazy: bool, world: int = 1) -> None:
    """Raises StartupError for a variable of the plug-in that would make answers wrong; the message gives the reason."""
    if lazy and world > 1 and environ.get(LAZY_COLLECTIVES, "true").lower() not in ("true", "1"):
        raise StartupError(
            f"{LAZY_COLLECTIVES}={environ[LAZY_COLLECTIVES]!r}: graphs of several ranks hold collectives: unset it, or "
            "set it to true"
        )
    reuse = environ.get(INPUT_REUSE, "").lower()
    if not lazy and reuse and reuse not in FALSE:
        raise StartupError(
            f"{INPUT_REUSE}={environ[INPUT_REUSE]} lets a recipe use its inputs as scratch memory, and static inputs "
            "are filled only where they change: unset it, or set it to 0"
        )


def settle(environ: Mapping[str, str], lazy: bool) -> dict[str, str]:
    """Returns the variables to add before the plug-in is imported; those that the user set are left alone.

    Collectives inside graphs need the lazy ones. The tensor cache stays on, as Intel's guide recommends for Qwen.
    Weights of a compiled graph are its inputs, so graphs share none. Scales of 8-bit floats are patched into a compiled
    recipe, instead of compiling one for each. Recipes of compile mode must leave static inputs alone, which are filled
    only where they change.
    """
    wanted = {MODE: "1" if lazy else "0", LAZY_COLLECTIVES: "true", TENSOR_CACHE_OFF: "0", WEIGHT_SHARING: "0"}
    if not lazy:
        wanted |= {INPUT_REUSE: "0", FUSER_THREADS: "1", SCALE_PATCHING: "1"}
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def emulated_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for a process that emulates: lazy unless the user requests otherwise, and no plug-in
    autoload.
    """
    lazy = requested_mode(environ) is not False
    wanted = {**settle(environ, lazy), AUTOLOAD: "0"}
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def unusable_message(why: str, environ: Mapping[str, str], stack: Stack) -> str:
    """Returns the error line for a plug-in that does not load, or that lacks a symbol of every release."""
    reason = explain(why, stack)
    problem = stack.problem()
    advice = (
        problem
        or f"{PLUGIN} {stack.plugin} and torch {stack.torch} must be of one Gaudi release: "
        f"{gaudi_card_and_plugin_detection.remedy(stack)}"
    )
    return f"the Gaudi plug-in cannot be used ({why}): {reason}{advice}; {SWITCH}=1 emulates a card instead"


CAUSES = (
    ("No module named 'habana_frameworks", "parts of it are missing (half installed); "),
    ("No module named", "a package that it needs is missing; "),
    ("undefined symbol", "it was built for another torch; "),
    ("Compile-time", "it was built for another torch; "),
    ("not supported in Lazy mode", f"{MODE}=1 needs Gaudi's own torch: unset it; "),
    ("has no attribute 'startswith'", "it takes a torch whose version names its build, such as +cpu; "),
    ("cannot open shared object file", "a library is missing: Gaudi's libraries lie in /usr/lib/habanalabs "
     "(LD_LIBRARY_PATH), or its own files are incomplete; "),
    ("GLIBC", "it was built for a newer Linux; "),
    ("Only a single TORCH_LIBRARY", "it was loaded twice, under two paths; "),
    ("partially initialized", f"torch imports it while it imports torch: {AUTOLOAD}=0 keeps them apart; "),
)  # fmt: skip
"""(part of an error's text, its meaning) pairs."""


def explain(why: str, stack: Stack) -> str:
    """Returns what an error of the plug-in's import means, ending with ``; ``; "" if it is not known."""
    return next((meaning for part, meaning in CAUSES if part in why), "")


def mode_conflict(environ: Mapping[str, str], lazy: bool) -> str | None:
    """Returns one line if the imported plug-in runs in another mode than the environment requests; else None."""
    asked = environ.get(MODE, "1") != "0"
    if asked == lazy:
        return None
    name = {True: "lazy", False: "eager"}
    return (
        f"{MODE}={environ.get(MODE, '')} asks for {name[asked]} mode and the plug-in runs in "
        f"{name[lazy]} mode: it was imported before the variable was set"
    )


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


def find_capability(environ: Mapping[str, str], index: int = 0, world: int = 1) -> Capability:
    """Examines this machine and this Python; imports nothing.

    Raises:
        StartupError: one line about a stack, a mode or a card that cannot be used.
    """
    check_mode(environ)
    here, found = gaudi_card_and_plugin_detection.find_machine(environ), gaudi_card_and_plugin_detection.find_stack()
    if choose(environ, here, found) == EMULATED:
        asked = requested_mode(environ)
        lazy = asked is not False
        refuse(environ, lazy, world)
        why = "as asked" if asked is not None else GRAPHS
        return Capability(False, found, here, lazy, why, (), "emulated")
    lazy, why = pick_mode(environ, found)
    running = loaded_mode()
    if running is not None and running != lazy:
        if requested_mode(environ) is not None:
            raise StartupError(mode_conflict({MODE: "1" if lazy else "0"}, running) or "")
        lazy, why = running, "the plug-in was imported before Trencadis could ask for lazy mode; set PT_HPU_LAZY_MODE"
    refuse(environ, lazy, world)
    gaudi_card_and_plugin_detection.check_index(environ, here, index, world)
    return Capability(
        True,
        found,
        here,
        lazy,
        why,
        missing(lazy, found, here),
        gaudi_card_and_plugin_detection.describe(environ, here),
    )


def missing(lazy: bool, found: Stack, here: Machine) -> tuple[str, ...]:
    """Returns what this stack lacks compared with others, in words for the user."""
    lacks = [] if lazy else ["HPU graphs, which exist in lazy mode alone: launches are compiled and not captured"]
    driver, plugin = (
        gaudi_card_and_plugin_detection.release(here.driver),
        gaudi_card_and_plugin_detection.release(found.plugin),
    )
    if driver is not None and plugin is not None and driver != plugin:
        lacks.append(f"a driver of its release: {here.driver} is loaded, and it is of {found.plugin}")
    return tuple(lacks)


def loaded_mode() -> bool | None:
    """Returns True if the plug-in runs in lazy mode; None if nothing in this process has imported it."""
    module: Any = sys.modules.get("habana_frameworks.torch.utils.internal")
    return None if module is None else bool(module.is_lazy())
