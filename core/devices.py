"""Finds backends and their policies without importing a device's library. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.device_shape_policy import Policy
from trencadis.core.errors import StartupError
from trencadis.core.renamed_plugin_api_error_hints import find_successors

TABLE = {
    "cpu": "trencadis.backends.cpu",
    "cuda": "trencadis.backends.cuda",
    "hpu": "trencadis.backends.hpu",
}
BUILT = ("cpu", "cuda", "hpu")
"""Built-in backends that can serve."""

SETTLERS = {
    "cuda": "trencadis.backends.cuda.visible_devices",
    "hpu": "trencadis.backends.hpu.start.hpu_process_setup",
}
"""Torch-free modules with ``settle(environ, index, rank, world) -> DeviceEnv``, which runs before torch is imported."""

TIMERS = {
    "cuda": "trencadis.backends.cuda.time_estimates.time_report",
    "hpu": "trencadis.backends.hpu.decode_step_time_estimate",
}
"""Modules with ``times(model, ranks, card, rows, context, depth, attention=...)`` and ``lines(report)``, for
``plan --time``.
"""

GROUP = "trencadis.backends"
"""Entry-point group under which an installed package offers ``make_backend``; its module also has ``pick_policy``."""

KERNELS = "trencadis.backends.cpu.native.kernel_choice_by_cpu"
"""A module with ``line()``, which names the kernels for quantised weights on the CPU."""

RESOURCES = {"cuda": "GPU", "hpu": "HPU", "cpu": "CPU"}
"""The cluster resource that a rank takes, by device."""

CARD_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES")
"""Environment variables in which a cluster scheduler lists the cards that a process may use."""

CONFORMANCE = "trencadis.backends.conformance"
"""The checks that every backend must pass."""


@dataclass(frozen=True)
class DeviceEnv:
    """The changes to a process's environment that a device needs before torch is imported.

    Args:
        variables: variables to add to the environment.
        lines: findings to print at start-up.
        removed: variables to remove.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def find_installed_backend(name: str) -> EntryPoint | None:
    """Returns the entry point of a backend from another package; built-in names cannot be replaced."""
    return None if name in TABLE else next((e for e in entry_points(group=GROUP) if e.name == name), None)


def import_backend(offered: EntryPoint) -> ModuleType:
    """The module of an installed package's backend.

    Raises:
        StartupError: it uses a name that this package has renamed; one line with the successor.
    """
    try:
        return import_module(offered.module)
    except (ImportError, AttributeError, TypeError) as error:
        successors = find_successors(error)
        if not successors:
            raise
        line = " ".join(str(error).split())[:160]
        raise StartupError(f"--device {offered.name}: its package failed: {line}{successors}") from None


def list_devices() -> list[str]:
    """Returns every device name that can be requested: the built-in ones, then those of installed packages."""
    return [*BUILT, *sorted({e.name for e in entry_points(group=GROUP)} - set(TABLE))]


PREFERRED = ("cuda",)
"""Devices that ``auto`` tries before the CPU, best first."""

LISTED = ("cuda", "hpu")
"""Devices whose packages have ``listing()``, ``usable()`` and ``cards(policy, environ)``."""


def parse(asked: str) -> tuple[str, int]:
    """Splits ``cuda:1`` into (name, index); the index defaults to 0.

    Raises:
        StartupError: the text after the colon is not a number.
    """
    name, colon, index = asked.partition(":")
    if colon and not index.isdecimal():
        raise StartupError(f"--device {asked}: {index!r} is no index; write e.g. {name}:0.")
    return name, int(index or 0)


class ChosenDevice(NamedTuple):
    """A device: its name, the number of its card, and a line for the user; "" if there is nothing to say."""

    name: str
    card: int
    line: str = ""


def choose(asked: str) -> ChosenDevice:
    """Returns the device that ``asked`` names; ``auto`` selects the best one that is usable here."""
    if asked != "auto":
        return ChosenDevice(*parse(asked))
    for name in PREFERRED:
        why = import_module(TABLE[name]).usable()
        if not why:
            return ChosenDevice(name, 0)
    return ChosenDevice("cpu", 0, f"--device auto: {why}; using the CPU.")


def likely(asked: str) -> str:
    """Returns the device name that ``asked`` probably selects, without loading a device library."""
    if asked != "auto":
        return parse(asked)[0]
    return next((name for name in PREFERRED if import_module(TABLE[name]).has_card()), "cpu")


def cards(asked: str, policy: str, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Returns how many cards a process may use for ``--device ASKED``, and a description; loads no device library.

    Returns None if the number is irrelevant or unknown: on the CPU, for one card given by index, for a simulated card,
    and for devices of other packages.

    Raises:
        StartupError: a variable that names cards cannot be read.
    """
    name = likely(asked)
    if ":" in asked or name not in LISTED:
        return None
    found: tuple[int, str] | None = import_module(TABLE[name]).cards(policy, environ)
    return found


def describe_devices() -> list[str]:
    """Returns one line for each device of this machine, or the reason why there is none of a kind."""
    lines: list[str] = []
    for name in LISTED:
        package = import_module(TABLE[name])
        lines += package.listing() or [f"{name:8} none: {package.usable()}"]
    return [*lines, f"cpu      {computing_cpus()} threads; {kernels()}"]


def kernels() -> str:
    """Returns one line that says which kernels run on this CPU and why."""
    line: str = import_module(KERNELS).line()
    return line


def policy_of(device: str, name: str = "") -> Policy:
    """Returns the policy called ``name`` of a device, from which plans are made without the device.

    Raises:
        StartupError: no such device, or one without a policy.
    """
    device = parse(device)[0]
    offered = find_installed_backend(device)
    if offered is not None:
        policy: Policy = import_backend(offered).pick_policy(name)
        return policy
    if device not in TABLE:
        raise StartupError(f"--device {device} is none of {', '.join(list_devices())}.")
    module = f"{TABLE[device]}.shape_policy"
    if find_spec(module) is None:
        raise StartupError(f"--device {device}: this backend has no policy yet; its shapes cannot be planned.")
    found: Policy = import_module(module).policy(name)
    return found


def timer(name: str) -> ModuleType:
    """Returns the module that predicts step times of a device that need not be present.

    Raises:
        StartupError: there are no figures for this device.
    """
    if name not in TIMERS:
        raise StartupError(f"plan --time: there are figures of cards for {', '.join(TIMERS)} alone, not for {name}")
    return import_module(TIMERS[name])
