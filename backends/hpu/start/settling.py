"""Settles a process for a Gaudi before torch is imported (``core.devices.SETTLERS``). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.backends.hpu.start import capability, environment, machine, recipes
from trencadis.core.devices import Settled


def settle(environ: Mapping[str, str], index: int = 0, rank: int = 0, world: int = 1) -> Settled:
    """Variables for a process that opens card ``index`` + ``rank``, and the lines of its banner.

    Raises:
        StartupError: see ``capability.find`` and ``recipes.settle``.
    """
    found = capability.find(environ, index + rank, world)
    if not found.real:
        variables = environment.emulated(environ)
        if {**environ, **variables}[environment.MODE] == "1":
            return Settled(variables, found.lines())
        kept = recipes.settle(environ, "emulated", rank)
        return Settled({**variables, **kept.variables}, (*found.lines(), *kept.lines), kept.removed)
    kept = recipes.settle(environ, f"{found.stack.plugin}-torch-{found.stack.torch}", rank)
    variables = {
        **environment.settle(environ, found.lazy),
        **machine.variables(environ, found.machine, index + rank, world),
        **kept.variables,
    }
    return Settled(variables, (*found.lines(), *kept.lines), kept.removed)
