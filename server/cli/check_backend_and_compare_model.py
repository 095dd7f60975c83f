"""``trencadis check-backend`` checks that a device does what the engine needs; ``trencadis check-model`` checks a
family.

A checkpoint's family must compute the same as transformers.
"""

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
from trencadis.core.process import torch_detection
from trencadis.server.cli.subcommand_flag_parser import CommandOptions, parse_options, print_help_if_asked
from trencadis.server.processes import signals_and_logging

USAGE = """\
usage: trencadis check-backend NAME [--json] [--quick] [--only CHECK[,CHECK ...]] [--dtype TYPE] [--policy NAME]

Runs every check on a backend: ops against the reference, padding, replay, memory, answers, speed. NAME is a value of
--device: a built-in device or one that an installed package offers (entry-point group trencadis.backends).
The model is the bundled demo. Exit code 0: no check failed; 1: one failed; 2: the backend cannot be made.

  --json             the report as JSON
  --quick            fewer shapes of each stage
  --only CHECK,...   checks whose names begin with these words, e.g. --only op.,padding
  --dtype TYPE       float32, bfloat16, float16, or serve: what serve takes for a checkpoint in bfloat16 (default:
                     float32 if the device supports it, which shows small errors, and then what serve takes)
  --policy NAME      another policy of the backend, e.g. cpu's padded
  --model FOLDER     another checkpoint
"""

VALUED = ("only", "dtype", "policy", "model")


def main(words: Sequence[str]) -> int:
    """Runs the ``check-backend`` command; returns the exit code."""
    if print_help_if_asked(words, USAGE):
        return 0
    asked = parse(words)
    if len(asked.names) != 1:
        raise StartupError(f"check-backend needs the name of one device: {', '.join(devices.list_devices())}.")
    signals_and_logging.raise_early_stop()
    torch_detection.prepare_device_env(asked.names[0])
    torch_detection.import_torch()
    suite = import_module(f"{devices.CONFORMANCE}.check_suite")
    subjects = import_module(f"{devices.CONFORMANCE}.backend_under_test")
    kinds = [asked.values["dtype"]] if "dtype" in asked.values else ["auto", "serve"]
    targets = [
        subjects.make_target(
            asked.names[0], _find_model_folder(asked), dtype=kind, policy=asked.values.get("policy", ""),
            quick="quick" in asked.flags,
        )
        for kind in kinds
    ]  # fmt: skip
    only = [o for o in asked.values.get("only", "").split(",") if o]
    unknown = [o for o in only if not any(name.startswith(o) for name in suite.CHECKS)]
    if unknown:
        known = ", ".join(suite.CHECKS)
        raise StartupError(f"--only {unknown[0]}: no check has a name that begins with it; checks: {known}.")
    distinct = list({target.dtype: target for target in targets}.values())
    return _run(suite, distinct, only, "json" in asked.flags)


def _run(suite: ModuleType, targets: Sequence[object], only: list[str], as_json: bool) -> int:
    """Runs the checks on each target, one dtype of the same device each. JSON has the second one's under ``served``."""
    result = import_module(f"{devices.CONFORMANCE}.check_result")

    def tell(one: Any) -> None:
        if not as_json:
            print(result.line(one), flush=True)

    reports = []
    for target in targets:
        reports.append(report := suite.run(target, only, tell))
        if as_json:
            continue
        for note in report.notes:
            print(f"note  {note}")
        inherited = ", ".join(report.inherited) or "none"
        print(f"ops inherited from the reference: {inherited}")
        print(f"{report.summary()} on {report.label} in {report.dtype}", flush=True)
    if as_json:
        served = {"served": reports[1].as_dict()} if reports[1:] else {}
        print(json.dumps(reports[0].as_dict() | served, indent=1))
    return 0 if all(report.passed for report in reports) else 1


def _find_model_folder(asked: CommandOptions) -> Path:
    if "model" in asked.values:
        return Path(asked.values["model"])
    from trencadis.assets import demo_path

    return Path(demo_path())


def parse(words: Sequence[str]) -> CommandOptions:
    """Parses the words; raises a StartupError that names the first unknown one."""
    return parse_options("check-backend", words, VALUED, ("json", "quick"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


MODEL_USAGE = """\
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


def check_model_main(words: Sequence[str]) -> int:
    """Runs the ``check-model`` command; returns the exit code."""
    if print_help_if_asked(words, MODEL_USAGE):
        return 0
    asked = parse_model_options(words)
    path = Path(asked.path)
    if not (path / "config.json").is_file():
        raise StartupError(f"check-model needs a folder with config.json; {asked.path or 'none'} is none")
    if not asked.dummy and not any(path.glob("*.safetensors")):
        raise StartupError(f"{path} holds no safetensors weights; --dummy makes random ones for a small model")
    signals_and_logging.raise_early_stop()
    torch_detection.prepare_device_env("cpu")
    torch_detection.import_torch()
    suite = import_module(f"{devices.CONFORMANCE}.check_model.checkpoint_checks")
    unknown = [o for o in asked.only if not any(name.startswith(o) for name in suite.CHECKS)]
    if unknown:
        known = ", ".join(suite.CHECKS)
        raise StartupError(f"--only {unknown[0]}: no check has a name that begins with it; checks: {known}.")
    if not asked.dummy:
        return _run_model_checks(suite, suite.CheckedModel(path, path, asked.seed), asked)
    load_config(path)  # refuses what no family serves, before anything is built
    oracle = import_module(f"{devices.CONFORMANCE}.check_model.transformers_oracle")
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
        return _run_model_checks(suite, suite.CheckedModel(made, path, asked.seed), asked)


def _run_model_checks(suite: ModuleType, model: object, asked: ModelCheckOptions) -> int:
    result = import_module(f"{devices.CONFORMANCE}.check_result")

    def tell(one: Any) -> None:
        if not asked.as_json:
            print(result.line(one), flush=True)

    report = suite.run(model, asked.only, tell)
    print(json.dumps(report.as_dict(), indent=1) if asked.as_json else report.summary())
    if report.results and not report.count(result.PASS) and report.passed:
        raise StartupError(f"nothing was checked: {report.results[0].reason}")
    return 0 if report.passed else 1


def parse_model_options(words: Sequence[str]) -> ModelCheckOptions:
    """Parses the words; raises a StartupError that names the first wrong one."""
    given = parse_options("check-model", words, ("only", "seed"), ("json", "dummy"), most_names=1)
    seed = given.values.get("seed", "0")
    if not seed.isdecimal() or int(seed) >= 2**63:
        raise StartupError(f"--seed {seed[:40]}: it must be a whole number from 0 to {2**63 - 1}.")
    only = tuple(one for one in given.values.get("only", "").split(",") if one)
    return ModelCheckOptions("".join(given.names), "json" in given.flags, "dummy" in given.flags, only, int(seed))


if __name__ == "__main__":
    sys.exit(check_model_main(sys.argv[1:]))
