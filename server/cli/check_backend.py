"""``trencadis check-backend``: checks that a device does what the engine needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trencadis.core import devices
from trencadis.core.errors import StartupError
from trencadis.core.process import torch_env
from trencadis.server.processes import signals

USAGE = """\
usage: trencadis check-backend NAME [--json] [--quick] [--only CHECK[,CHECK ...]] [--dtype TYPE] [--policy NAME]

Runs every check on a backend: ops against the reference, padding, replay, memory, answers, speed. NAME is a value of
--device: a built-in device or one that an installed package offers (entry-point group trencadis.backends).
The model is the bundled demo. Exit code 0: no check failed; 1: one failed; 2: the backend cannot be made.

  --json             the report as JSON
  --quick            fewer shapes of each stage
  --only CHECK,...   checks whose names begin with these words, e.g. --only op.,padding
  --dtype TYPE       float32 (the default if the device supports it), bfloat16 or float16
  --policy NAME      another policy of the backend, e.g. cpu's padded
  --model FOLDER     another checkpoint
"""

VALUED = ("only", "dtype", "policy", "model")


@dataclass(slots=True)
class CheckOptions:
    """The options of the command line."""

    names: list[str] = field(default_factory=list)
    as_json: bool = False
    quick: bool = False
    values: dict[str, str] = field(default_factory=dict)


def main(words: Sequence[str]) -> int:
    """Runs the ``check-backend`` command; returns the exit code."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    asked = parse(words)
    if len(asked.names) != 1:
        raise StartupError(f"check-backend needs the name of one device: {', '.join(devices.list_devices())}.")
    signals.raise_early_stop()
    torch_env.prepare_device_env(asked.names[0])
    torch_env.import_torch()
    suite = import_module(f"{devices.CONFORMANCE}.suite")
    subjects = import_module(f"{devices.CONFORMANCE}.target")
    subject = subjects.make_target(
        asked.names[0], _find_model_folder(asked), dtype=asked.values.get("dtype", "auto"),
        policy=asked.values.get("policy", ""), quick=asked.quick,
    )  # fmt: skip
    only = [o for o in asked.values.get("only", "").split(",") if o]
    unknown = [o for o in only if not any(name.startswith(o) for name in suite.CHECKS)]
    if unknown:
        known = ", ".join(suite.CHECKS)
        raise StartupError(f"--only {unknown[0]}: no check has a name that begins with it; checks: {known}.")
    return _run(suite, subject, only, asked.as_json)


def _run(suite: ModuleType, subject: object, only: list[str], as_json: bool) -> int:
    result = import_module(f"{devices.CONFORMANCE}.check_result")

    def tell(one: Any) -> None:
        if not as_json:
            print(result.line(one), flush=True)

    report = suite.run(subject, only, tell)
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
        return 0 if report.passed else 1
    for note in report.notes:
        print(f"note  {note}")
    inherited = ", ".join(report.inherited) or "none"
    print(f"ops inherited from the reference: {inherited}")
    print(f"{report.summary()} on {report.label} in {report.dtype}")
    return 0 if report.passed else 1


def _find_model_folder(asked: CheckOptions) -> Path:
    if "model" in asked.values:
        return Path(asked.values["model"])
    from trencadis.assets import demo_path

    return Path(demo_path())


def parse(words: Sequence[str]) -> CheckOptions:
    """Parses the words; raises a StartupError that names the first unknown one."""
    asked, queue = CheckOptions(), list(words)
    while queue:
        word = queue.pop(0)
        name, sign, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            asked.names.append(word)
        elif name == "json" and not sign:
            asked.as_json = True
        elif name == "quick" and not sign:
            asked.quick = True
        elif name in VALUED:
            if not sign and not queue:
                raise StartupError(f"--{name} needs a value.")
            asked.values[name] = value if sign else queue.pop(0)
        else:
            raise StartupError(f"check-backend does not know {word}; --help says what it takes.")
    return asked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
