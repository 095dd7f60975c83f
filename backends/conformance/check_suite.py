"""The list of checks, the loop that runs them on one backend, and the probes of ``trencadis check-device``.

Launch times of each stage are for information; that check never fails.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from trencadis.backends.conformance import (
    answer_checks,
    memory_checks,
    op_checks,
    op_checks_layers,
    op_checks_recurrent,
    op_checks_sampling,
    op_checks_vision,
    program_checks,
)
from trencadis.backends.conformance.backend_under_test import CheckTarget, make_target
from trencadis.backends.conformance.check_result import FAIL, PASS, SKIP, CheckFailed, Report, Result, Skipped
from trencadis.backends.conformance.launch_harness import all_buckets
from trencadis.backends.conformance.program_checks import make_harness
from trencadis.core.buckets import Stage, padded_tokens
from trencadis.core.device.backend import Backend, ProgramState

UNITS = {Stage.VISION: "slots", Stage.SAMPLE: "rows", Stage.RESET: "rows", Stage.POOL: "rows"}


def speed_sheet(target: CheckTarget) -> str:
    """Times launches of each stage's largest bucket, replayed if the device captures."""
    harness = make_harness(target)
    backend = harness.backend
    lines = []
    for stage in harness.stages:
        bucket = max(all_buckets(harness.plan, stage), key=padded_tokens)
        program = backend.program(bucket, harness.body(bucket))
        inputs, _ = harness.inputs(bucket, np.random.default_rng(3))
        backend.fill(program, inputs)
        harness.prepare(False)
        program.run()
        program.capture()
        took = []
        for _ in range(2 if target.quick else 7):
            begun = time.perf_counter()
            backend.fill(program, inputs)
            (program.replay if program.state is ProgramState.CAPTURED else program.run)()
            backend.synchronize()
            took.append(time.perf_counter() - begun)
        program.release()
        each = median(took)
        rate = f"{padded_tokens(bucket) / each:.0f} {UNITS.get(stage, 'tokens')}/s"
        lines.append(f"{bucket} {1e3 * each:.2f} ms ({rate})")
    return ", ".join(lines)


Check = Callable[[CheckTarget], str]
Target = TypeVar("Target")

CHECKS: dict[str, Check] = {
    "op.linear": op_checks.linear,
    "op.quantised": op_checks_layers.quantised_linear,
    "op.rms_norm": op_checks.rms_norm,
    "op.layer_norm": op_checks_layers.layer_norm,
    "op.silu_mul": op_checks.silu_mul,
    "op.act": op_checks_layers.act,
    "op.act_mul": op_checks_layers.act_mul,
    "op.experts": op_checks_layers.experts,
    "op.experts.quantised": op_checks_layers.quantised_experts,
    "op.rotary": op_checks.rotary,
    "op.rope_store": op_checks.rope_store,
    "op.attend": op_checks.attend,
    "op.attend.window": op_checks_layers.attend_window,
    "op.attend.upto": op_checks_layers.attend_upto,
    "op.attend.sinks": op_checks_layers.attend_sinks,
    "op.layer": op_checks_layers.layer,
    "op.attend_pictures": op_checks_layers.cross_attend,
    "op.recurrent": op_checks_recurrent.recurrent,
    "op.patches": op_checks_vision.patches,
    "op.rope_vision": op_checks_vision.rope_vision,
    "op.attend_windows": op_checks_vision.attend_windows,
    "op.attend_images": op_checks_vision.attend_images,
    "op.interpolate": op_checks_vision.interpolate,
    "op.embed": op_checks.embed,
    "op.gather_rows": op_checks.gather_rows,
    "op.scatter_rows": op_checks.scatter_rows,
    "op.sample": op_checks_sampling.sample,
    "op.reset": op_checks_sampling.reset,
    "op.pool": op_checks_layers.pool,
    "padding": program_checks.padding,
    "replay": program_checks.replay,
    "refill": program_checks.refill,
    "determinism": program_checks.determinism,
    "shapes": program_checks.shapes,
    "waiting": program_checks.waiting,
    "memory": memory_checks.memory,
    "release": memory_checks.release,
    "ledger": memory_checks.ledger,
    "rollback": memory_checks.rollback,
    "out-of-memory.capture": memory_checks.out_of_memory_in_capture,
    "out-of-memory.step": memory_checks.out_of_memory_in_step,
    "tokens": answer_checks.greedy,
    "tokens.sampled": answer_checks.random_sampling,
    "speed": speed_sheet,
}
"""Checks by name, in order. A check returns its figure, or raises CheckFailed or Skipped."""


def run(target: CheckTarget, only: Iterable[str] = (), tell: Callable[[Result], None] = lambda result: None) -> Report:
    """Runs every check, or those whose names begin with one of ``only``, and calls ``tell`` with each result."""
    prefixes = tuple(only)
    report = Report(target.name, "", str(target.dtype).removeprefix("torch."))
    threads = torch.get_num_threads()
    try:
        backend = target.backend()
        report.label, report.notes = backend.label, backend.notes
        report.inherited = op_checks.list_inherited_ops(backend.ops)
        del backend
        for name, check in CHECKS.items():
            if not prefixes or name.startswith(prefixes):
                report.results.append(run_check(name, check, target))
                tell(report.results[-1])
    finally:
        torch.set_num_threads(threads)
    return report


def run_check(name: str, check: Callable[[Target], str], target: Target) -> Result:
    """Runs one check. Any exception except Skipped counts as a failure."""
    asks = (check.__doc__ or "").strip().splitlines()[0]
    begun = time.perf_counter()
    status, figure, reason = PASS, "", ""
    try:
        figure = check(target)
    except Skipped as skipped:
        status, reason = SKIP, str(skipped)
    except CheckFailed as failed:
        status, reason = FAIL, str(failed)
    except Exception as error:
        status, reason = FAIL, f"{type(error).__name__}: {' '.join(str(error).split())}"
    with contextlib.suppress(RuntimeError):
        gc.collect()
    return Result(name, status, asks, figure, reason, time.perf_counter() - begun)


def probes(name: str, checkpoint: Path, index: int = 0) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields (name, function to run) for card ``index`` of a device; the function returns a figure, or raises.

    Raises:
        StartupError: there is no such backend, or it cannot be made.
    """
    of = replace(make_target(name, checkpoint, dtype="serve", quick=True), index=index)
    backend = of.backend()
    yield "device", lambda: f"{backend.label}, {of.dtype}, {backend.memory.free() / 2**30:.1f} GiB free"
    for check, run in CHECKS.items():
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
