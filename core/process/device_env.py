"""Prepares a process's environment before its first import of torch. Torch-free.

A device's plug-in reads its variables once, while it is imported, and torch may import it by itself. So the variables
are set first: by the server for the engine that it starts, and by the engine, each rank and an offline ``LLM`` for
themselves. The device's package defines which variables it needs; ``core.devices`` finds it by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from importlib import import_module

from trencadis.core import devices
from trencadis.core.process import torch_build


def prepare_device_env(
    asked: str, environ: MutableMapping[str, str] | None = None, rank: int = 0, world: int = 1
) -> devices.DeviceEnv:
    """Prepares ``environ`` (None: this process's own) for ``--device ASKED``; returns the changes and messages.

    Variables set by the user are kept or refused, never replaced. A second call changes nothing.

    Raises:
        StartupError: the device cannot start with this torch, plug-in or variable; one line.
    """
    env = os.environ if environ is None else environ
    note = torch_build.check_version(torch_build.find_torch())
    name = devices.likely(asked)
    module = devices.SETTLERS.get(name, "")
    found = devices.DeviceEnv()
    if module:
        found = import_module(module).settle(env, devices.parse(asked)[1] if asked != "auto" else 0, rank, world)
    variables = dict(found.variables)
    late = env is os.environ and "torch" in sys.modules
    if name in devices.BUILT and not late and not env.get(torch_build.AUTOLOAD):
        # Built-in backends import what they need themselves, where a failure can be explained.
        variables[torch_build.AUTOLOAD] = "0"
    env.update(variables)
    for gone in found.removed:
        env.pop(gone, None)
    return devices.DeviceEnv(variables, (note, *found.lines) if note else tuple(found.lines), found.removed)
