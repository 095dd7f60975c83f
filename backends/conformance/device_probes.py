"""Probes of ``trencadis check-device`` through the backend's protocol: ops, copies, a graph, a collective."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from trencadis.backends.conformance import program_checks, suite
from trencadis.backends.conformance.check_result import CheckFailed, Skipped
from trencadis.backends.conformance.target import CheckTarget, make_target
from trencadis.core.device.backend import Backend


def probes(name: str, checkpoint: Path, index: int = 0) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields (name, function to run) for card ``index`` of a device; the function returns a figure, or raises.

    Raises:
        StartupError: there is no such backend, or it cannot be made.
    """
    of = replace(make_target(name, checkpoint, quick=True), index=index)
    backend = of.backend()
    yield "device", lambda: f"{backend.label}, {of.dtype}, {backend.memory.free() / 2**30:.1f} GiB free"
    for check, run in suite.CHECKS.items():
        if check.startswith("op."):
            yield check, lambda run=run: run(of)  # type: ignore[misc]
    yield "copies", lambda: copies(backend)
    yield "graph", lambda: graph(of, backend)
    yield "collective", lambda: collective(backend)


def copies(backend: Backend) -> str:
    """Copies 8 MB to the device and back."""
    host = torch.arange(2 << 20, dtype=torch.int32)
    target = backend.zeros(host.shape, host.dtype)
    backend.synchronize()
    begun = time.perf_counter()
    target.copy_(host, non_blocking=True)
    backend.synchronize()
    there = time.perf_counter() - begun
    begun = time.perf_counter()
    found = torch.empty_like(host)
    found.copy_(target)
    back = time.perf_counter() - begun
    if not torch.equal(found, host):
        raise CheckFailed(f"{int((found != host).sum())} of {host.numel()} values differ after both copies")
    return f"there {host.nbytes / there / 1e9:.1f} GB/s, back {host.nbytes / max(back, 1e-9) / 1e9:.1f} GB/s"


def graph(of: CheckTarget, backend: Backend) -> str:
    """Captures launches and replays them with other values."""
    if not backend.policy.captures:
        raise Skipped("this device has no graphs")
    return program_checks.replay(of)


def collective(backend: Backend) -> str:
    """Sums over a group of one, through the library that several ranks use."""
    name = {"cpu": "gloo", "cuda": "nccl"}.get(backend.device.type, "")
    if not name or not torch.distributed.is_available():
        raise Skipped("no library of collectives is known for this device")
    if torch.distributed.is_initialized():
        raise Skipped("this process has a group already")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder, 'store')}"
        torch.distributed.init_process_group(name, init_method=meeting, rank=0, world_size=1)
        try:
            x = torch.ones(16, device=backend.device)
            torch.distributed.all_reduce(x)
            total = float(x.sum())
        finally:
            torch.distributed.destroy_process_group()
    if total != 16:
        raise CheckFailed(f"the sum of ones is {total / 16}")
    return f"all_reduce over {name}, one rank"
