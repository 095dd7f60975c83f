"""Sets a process up for a Gaudi before torch is imported (``core.devices.SETTLERS``). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from trencadis.backends.hpu.start import capability, environment, machine, recipe_cache
from trencadis.core.devices import DeviceEnv


def settle(environ: Mapping[str, str], index: int = 0, rank: int = 0, world: int = 1) -> DeviceEnv:
    """Returns the variables for a process that opens card ``index`` + ``rank``, and the lines of its banner.

    Raises:
        StartupError: see ``capability.find`` and ``recipe_cache.settle``.
    """
    found = capability.find(environ, index + rank, world)
    if not found.real:
        variables = environment.emulated_variables(environ)
        if {**environ, **variables}[environment.MODE] == "1":
            return DeviceEnv(variables, found.lines())
        kept = recipe_cache.settle(environ, "emulated", rank)
        return DeviceEnv({**variables, **kept.variables}, (*found.lines(), *kept.lines), kept.removed)
    kept = recipe_cache.settle(environ, f"{found.stack.plugin}-torch-{found.stack.torch}", rank)
    variables = {
        **environment.settle(environ, found.lazy),
        **machine.variables(environ, found.machine, index + rank, world),
        **kept.variables,
    }
    return DeviceEnv(variables, (*found.lines(), *kept.lines), kept.removed)
