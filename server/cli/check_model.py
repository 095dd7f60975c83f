"""``trencadis check-model``: checks that a checkpoint's family computes the same as transformers."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from trencadis.core import devices
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.errors import StartupError
from trencadis.core.process import torch_env
from trencadis.server.processes import signals

USAGE = """\
usage: trencadis check-model PATH [--json] [--only CHECK[,CHECK ...]] [--dummy] [--seed N]

Checks the family that serves a checkpoint, built in or of an installed package (entry-point group trencadis.models),
against transformers, in float32 on the CPU: keys of config.json, weights, the memory plan's bytes, each part of each
layer, logits of whole and cut prompts, greedy tokens, poisoned padding, two ranks. PATH is a folder.
Exit code 0: no check failed; 1: one failed; 2: there is nothing to check.

  --json             the report as JSON
  --only CHECK,...   checks whose names begin with these words, e.g. --only logits,parts
  --dummy            random weights for a small model with the other keys of PATH/config.json
  --seed N           of the weights and prompts (default 0)
"""


@dataclass(slots=True)
class ModelCheckOptions:
    """The options of the command line."""

    path: str = ""
    as_json: bool = False
    dummy: bool = False
    only: tuple[str, ...] = ()
    seed: int = 0


def main(words: Sequence[str]) -> int:
    """Runs the ``check-model`` command; returns the exit code."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    asked = parse(words)
    path = Path(asked.path)
    if not (path / "config.json").is_file():
        raise StartupError(f"check-model needs a folder with config.json; {asked.path or 'none'} is none")
    if not asked.dummy and not any(path.glob("*.safetensors")):
        raise StartupError(f"{path} holds no safetensors weights; --dummy makes random ones for a small model")
    signals.raise_early_stop()
    torch_env.prepare_device_env("cpu")
    torch_env.import_torch()
    suite = import_module(f"{devices.CONFORMANCE}.family.family_checks")
    unknown = [o for o in asked.only if not any(name.startswith(o) for name in suite.CHECKS)]
    if unknown:
        known = ", ".join(suite.CHECKS)
        raise StartupError(f"--only {unknown[0]}: no check has a name that begins with it; checks: {known}.")
    if not asked.dummy:
        return _run(suite, suite.CheckedModel(path, path, asked.seed), asked)
    load_config(path)  # refuses what no family serves, before anything is built
    oracle = import_module(f"{devices.CONFORMANCE}.family.transformers_oracle")
    result = import_module(f"{devices.CONFORMANCE}.check_result")
    with tempfile.TemporaryDirectory(prefix="trencadis-") as folder:
        made = Path(folder) / path.resolve().name
        try:
            oracle.write_dummy(path, made, asked.seed)
        except result.Skipped as reason:
            raise StartupError(f"--dummy: {reason}") from None
        except Exception as error:  # transformers may raise anything for a configuration that it does not accept
            line = " ".join(str(error).split())[:160]
            failed = f"{type(error).__name__}: {line}"
            raise StartupError(f"--dummy: transformers builds no small {path.name}: {failed}") from None
        return _run(suite, suite.CheckedModel(made, path, asked.seed), asked)


def _run(suite: ModuleType, model: object, asked: ModelCheckOptions) -> int:
    result = import_module(f"{devices.CONFORMANCE}.check_result")

    def tell(one: Any) -> None:
        if not asked.as_json:
            print(result.line(one), flush=True)

    report = suite.run(model, asked.only, tell)
    print(json.dumps(report.as_dict(), indent=1) if asked.as_json else report.summary())
    if report.results and not report.count(result.PASS) and report.passed:
        raise StartupError(f"nothing was checked: {report.results[0].reason}")
    return 0 if report.passed else 1


def parse(words: Sequence[str]) -> ModelCheckOptions:
    """Parses the words; raises a StartupError that names the first wrong one."""
    asked, queue = ModelCheckOptions(), list(words)
    while queue:
        word = queue.pop(0)
        name, sign, value = word.removeprefix("--").partition("=")
        if not word.startswith("-") and not asked.path:
            asked.path = word
        elif word in ("--json", "--dummy"):
            asked.as_json, asked.dummy = asked.as_json or name == "json", asked.dummy or name == "dummy"
        elif word.startswith("--") and name in ("only", "seed"):
            if not sign and not queue:
                raise StartupError(f"--{name} needs a value.")
            _set(asked, name, value if sign else queue.pop(0))
        else:
            raise StartupError(f"check-model does not know {word}; --help says what it takes.")
    return asked


def _set(asked: ModelCheckOptions, name: str, value: str) -> None:
    if name == "only":
        asked.only = tuple(one for one in value.split(",") if one)
        return
    if not value.isdecimal() or int(value) >= 2**63:
        raise StartupError(f"--seed {value[:40]}: it must be a whole number from 0 to {2**63 - 1}.")
    asked.seed = int(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
