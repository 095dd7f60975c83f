"""The suite notices: each mistake that is planted into a copy of a backend is named by the check that must name it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.planted_faults import FAULTS, noticeable, of_kind, verdict

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ("cpu", "padded", "hpu", "stub", "numpy")
GENERAL = [name for name, fault in FAULTS.items() if not fault.needs]
CHEAP = [name for name in GENERAL if FAULTS[name].check.startswith("op.")]


def test_there_are_enough() -> None:
    assert len(GENERAL) >= 15 and {f.check.split(".")[0] for f in FAULTS.values()} >= {
        "op", "padding", "replay", "refill", "determinism", "shapes", "release", "waiting", "out-of-memory",
    }  # fmt: skip


def test_named_on_the_cpu() -> None:
    of = of_kind("cpu")
    missed = {name: said for name in GENERAL if (said := verdict(of, FAULTS[name]))}
    assert not missed


def test_named_on_the_example() -> None:
    of = of_kind("numpy")
    rest = [name for name in GENERAL if name not in CHEAP]
    cheap = noticeable(of, CHEAP)
    assert len(cheap) == len(CHEAP) - 5, "the example attends causally to all keys, and to no images"
    chosen = [*random.Random(11).sample(cheap, 5), *random.Random(12).sample(rest, 2)]
    missed = {name: said for name in chosen if (said := verdict(of, FAULTS[name]))}
    assert not missed


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_on_every_device(kind: str) -> None:
    """The device passes the whole suite, and a copy of it with any of the faults fails the check that names it."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "stubs" if kind == "stub" else ROOT)))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PT_HPU", "TRENCADIS_"))}
    env = {**clean, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "tests.hostile.planted_faults", kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind}: {found['checks']} checks, {found['named']} faults named, missed {found['missed'] or 'none'}")
    assert not found["clean"] and not found["missed"]
    unpromised = 5 if kind == "numpy" else 0
    assert found["named"] >= (len(FAULTS) if kind == "hpu" else len(GENERAL)) - unpromised
