"""``trencadis check-device``: describes a device's software stack, and tests each part of it with a small piece of
work.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

from trencadis.core import devices
from trencadis.core.errors import StartupError
from trencadis.core.process import torch_detection
from trencadis.server.cli.subcommand_flag_parser import print_help_if_asked
from trencadis.server.processes import signals_and_logging

USAGE = """\
usage: trencadis check-device [DEVICE] [--json]      what this machine would serve on; DEVICE as --device takes it
       trencadis check-NAME [INDEX] [--json]         the same for one device: {names}

Prints versions, mode and cards, then runs one small operation of each kernel, copies, a graph and a collective, one
line each. Exit code 0: all is well; 1: a line failed; 2: the device cannot be started, and the line says why.
"""

Line = tuple[str, str, str]
"""Line of the report: (pass, fail, none or info; what; detail)."""


def list_devices() -> list[str]:
    """Returns the devices that have a command of their own."""
    return sorted(devices.BUILT)


def main(words: Sequence[str], device: str = "") -> int:
    """Runs ``check-device``, or ``check-NAME`` of ``device``; returns the exit code."""
    if print_help_if_asked(words, USAGE.format(names=", ".join(list_devices()))):
        return 0
    asked, as_json = parse(words, device)
    signals_and_logging.raise_early_stop()
    lines: list[Line] = []

    def tell(line: Line) -> None:
        lines.append(line)
        if not as_json:
            print(f"{line[0]:4}  {line[1]:24} {line[2]}", flush=True)

    try:
        check(asked, tell)
    except StartupError as error:
        tell(("fail", "start", str(error)))
        code = 2
    else:
        code = 1 if any(line[0] == "fail" for line in lines) else 0
    if as_json:
        print(json.dumps({"device": asked, "exit": code, "lines": lines}, indent=1))
    else:
        passed, failed = (sum(line[0] == status for line in lines) for status in ("pass", "fail"))
        print(f"{asked}: {passed} passed, {failed} failed")
    return code


def parse(words: Sequence[str], device: str = "") -> tuple[str, bool]:
    """Returns (value of ``--device``, True if JSON is requested).

    Raises:
        StartupError: an unknown word.
    """
    named = [word for word in words if not word.startswith("-")]
    wrong = [word for word in words if word.startswith("-") and word != "--json"]
    if wrong or len(named) > 1 or (device and named and not named[0].isdecimal()):
        said = (wrong or named[-1:])[0]
        raise StartupError(f"check-{device or 'device'} does not know {said}; --help says what it takes.")
    if device:
        return (f"{device}:{named[0]}" if named else device), "--json" in words
    return (named[0] if named else "auto"), "--json" in words


def check(asked: str, tell: Callable[[Line], None]) -> None:
    """Calls ``tell`` with every line about a device.

    Raises:
        StartupError: it cannot be started.
    """
    build = torch_detection.find_torch()
    name, index = devices.likely(asked), devices.parse(asked)[1] if asked != "auto" else 0
    tell(("info", "python", sys.version.split()[0]))
    package = None if name == "cpu" else import_module(devices.TABLE.get(name, "") or _get_backend_module(name))
    describe = getattr(package, "describe", None)
    if describe is not None:
        for what, text in describe(index):
            tell(("info", what, text))
    else:
        tell(("info", "torch", build.version if build else "not installed"))
    for line in torch_detection.prepare_device_env(asked).lines:
        if describe is None:
            tell(("info", "device", line))
    torch_detection.import_torch()
    package = package or import_module(devices.TABLE[name])
    own = getattr(package, "probes", None)
    if own is None:
        for line in getattr(package, "listing", list)():
            tell(("info", "card", line))
    for what, run in own(index) if own is not None else _make_generic_probes(name, index):
        tell(run_probe(what, run))


def _get_backend_module(name: str) -> str:
    """Returns the module of an installed package's backend.

    Raises:
        StartupError: there is none.
    """
    offered = devices.find_installed_backend(name)
    if offered is None:
        raise StartupError(f"unknown device {name!r}; available: {', '.join(devices.list_devices())}")
    return offered.module


def _make_generic_probes(name: str, index: int) -> Iterable[tuple[str, Callable[[], str]]]:
    """Returns probes that use only the backend's protocol."""
    from trencadis.assets import demo_path

    module = import_module(f"{devices.CONFORMANCE}.check_suite")
    found: Iterable[tuple[str, Callable[[], str]]] = module.probes(name, Path(demo_path()), index)
    return found


def run_probe(what: str, run: Callable[[], str]) -> Line:
    """Runs one probe; any exception becomes a line."""
    begun = time.perf_counter()
    try:
        figure = run()
    except Exception as error:
        if type(error).__name__ == "Skipped":
            return "none", what, str(error)
        said = " ".join(str(error).split())[:300]
        kind = "" if type(error).__module__.startswith("trencadis.") else f"{type(error).__name__}: "
        return "fail", what, f"{kind}{said}"
    return "pass", what, figure or f"{time.perf_counter() - begun:.2f} s"


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
