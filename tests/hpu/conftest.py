"""An emulated card, and the backend on it; processes over the stub of the plug-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trencadis.backends.hpu.backend import HpuBackend
from trencadis.backends.hpu.emulator.card_profiles_and_op_support import profile
from trencadis.backends.hpu.emulator.emulated_bridge import make_bridge
from trencadis.backends.hpu.emulator.emulated_device import EmulatedDevice
from trencadis.backends.hpu.emulator.injected_faults import parse
from trencadis.backends.hpu.hpu_settings import HpuSettings
from trencadis.backends.hpu.shape_policy import policy
from trencadis.core.device.backend import BackendConfig

ROOT = Path(__file__).resolve().parents[2]

FORKS = """
import json, os, sys, traceback
import numpy, torch
exec(sys.argv[1])

def play(code, args, env, folder):
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = args
    try:
        exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
        return 0
    except BaseException:
        traceback.print_exc()
        return 1

for line in sys.stdin:
    child = os.fork()
    if not child:
        status = play(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports torch once and runs its argument, then each piece of code in a process of its own, forked before the plug-in
is imported."""

COUNTS, SECONDS = "TRENCADIS_TEST_COUNTS", "TRENCADIS_TEST_SECONDS"
"""Folder that keeps how far long counts have come, and the seconds of one run; unset: each run is whole."""


def run_in_pieces(name: str, total: int, piece: Callable[[int], int]) -> None:
    """Calls ``piece`` with the count that is done, until ``total`` are; it returns how many more it has done.

    With ``TRENCADIS_TEST_COUNTS`` a run goes on where an earlier one ended, and skips the test after
    ``TRENCADIS_TEST_SECONDS`` seconds if it is not over.
    """
    folder = os.environ.get(COUNTS, "")
    kept = Path(folder, "".join(c if c.isalnum() else "-" for c in name)) if folder else None
    done = int(kept.read_text()) if kept is not None and kept.exists() else 0
    end = time.monotonic() + float(os.environ.get(SECONDS, "inf"))
    while done < total:
        if kept is not None and time.monotonic() > end:
            pytest.skip(f"{name}: {done} of {total} are done")
        done += piece(done)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(str(done))
    print(f"{name}: {done} of {total}")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def over_stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``over_stub(code, *args, **env)``: what ``code`` ends in, in a process over the stub of the plug-in."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/stubs")])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PT_HPU", "TRENCADIS_", "HLS_", "OMPI_"))}
    clean |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with fork_starts(clean, tmp_path_factory.mktemp("forks")) as run:
        yield run


@contextmanager
def fork_starts(clean: dict[str, str], folder: Path, first: str = "") -> Iterator[Run]:
    """Yields ``run(code, *args, **env)``, which runs code in a process that has imported torch, and no plug-in.

    Args:
        clean: the environment of all processes.
        first: code to run before they are forked.
    """
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", FORKS, first], env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None

    def run(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps([code, args, {**clean, **env}, str(folder)]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(args, status, out, err)

    try:
        yield run
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()


@pytest.fixture
def card() -> EmulatedDevice:
    """A Gaudi 2 that computes; new tensors of the test go to it."""
    device = EmulatedDevice(profile(""))
    make_bridge(device)
    return device


@pytest.fixture
def hpu() -> Callable[..., Any]:
    """``hpu(block_size=4, faults="oom@capture:1")``: a backend on a card of its own.

    ``pinned``: host memory for copies is ordinary memory, which the bridge says is pinned, or is not.
    """

    def make(
        *, faults: str = "", computes: bool = True, lazy: bool = True, kernels: bool = True,
        pinned: bool | None = None, **cfg: Any,
    ) -> Any:  # fmt: skip
        import dataclasses

        device = EmulatedDevice(profile(""), computes, parse(faults))
        bridge = make_bridge(device, lazy)
        if not kernels:
            missing = ("fused_sdpa", "fused_rms_norm", "apply_rotary", "sdpa_parts", "product", "block_adjustment")
            without: dict[str, Any] = dict.fromkeys(missing)
            bridge = dataclasses.replace(bridge, **without)
        if pinned is not None:
            bridge = dataclasses.replace(bridge, pin=lambda tensor: tensor.detach().clone(), pinned=pinned)
        switches = cfg.pop("switches", HpuSettings(fp32_softmax_vision=True))
        backend = HpuBackend(BackendConfig(**cfg), policy(""), bridge, switches)
        backend.card = device  # type: ignore[attr-defined]
        return backend

    return make
