"""The list of checks, and the loop that runs them on one backend."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from trencadis.backends.conformance import (
    graphs,
    ops,
    ops_parts,
    ops_pooling,
    ops_quantised,
    ops_sampling,
    ops_vision,
    programs,
    speed,
    tokens,
)
from trencadis.backends.conformance.result import FAIL, PASS, SKIP, CheckFailed, Report, Result, Skipped
from trencadis.backends.conformance.subject import Subject

Check = Callable[[Subject], str]
Checked = TypeVar("Checked")

CHECKS: dict[str, Check] = {
    "op.linear": ops.linear,
    "op.quantised": ops_quantised.quantised,
    "op.rms_norm": ops.rms_norm,
    "op.layer_norm": ops_parts.layer_norm,
    "op.silu_mul": ops.silu_mul,
    "op.act": ops_parts.act,
    "op.act_mul": ops_parts.act_mul,
    "op.experts": ops_parts.experts,
    "op.rotary": ops.rotary,
    "op.rope_store": ops.rope_store,
    "op.attend": ops.attend,
    "op.attend.window": ops_parts.attend_window,
    "op.attend.upto": ops_parts.attend_upto,
    "op.attend_pictures": ops_parts.attend_pictures,
    "op.patches": ops_vision.patches,
    "op.rope_vision": ops_vision.rope_vision,
    "op.attend_windows": ops_vision.attend_windows,
    "op.attend_images": ops_vision.attend_images,
    "op.interpolate": ops_vision.interpolate,
    "op.embed": ops.embed,
    "op.gather_rows": ops.gather_rows,
    "op.scatter_rows": ops.scatter_rows,
    "op.sample": ops_sampling.sample,
    "op.reset": ops_sampling.reset,
    "op.pool": ops_pooling.pool,
    "padding": programs.padding,
    "replay": programs.replay,
    "refill": programs.refill,
    "determinism": programs.determinism,
    "shapes": programs.shapes,
    "waiting": programs.waiting,
    "memory": graphs.memory,
    "release": graphs.release,
    "ledger": graphs.ledger,
    "rollback": graphs.rollback,
    "out-of-memory.capture": graphs.out_of_memory_in_capture,
    "out-of-memory.step": graphs.out_of_memory_in_step,
    "tokens": tokens.greedy,
    "tokens.sampled": tokens.sampled,
    "speed": speed.speed_sheet,
}
"""By name, in order. A check returns its figure, or raises CheckFailed or Skipped."""


def run(subject: Subject, only: Iterable[str] = (), tell: Callable[[Result], None] = lambda result: None) -> Report:
    """Runs every check, or those whose names begin with one of ``only``, and calls ``tell`` with each result."""
    prefixes = tuple(only)
    report = Report(subject.name, "", str(subject.dtype).removeprefix("torch."))
    threads = torch.get_num_threads()
    try:
        backend = subject.backend()
        report.label, report.notes = backend.label, backend.notes
        report.inherited = ops.inherited(backend.ops)
        del backend
        for name, check in CHECKS.items():
            if not prefixes or name.startswith(prefixes):
                report.results.append(run_check(name, check, subject))
                tell(report.results[-1])
    finally:
        torch.set_num_threads(threads)
    return report


def run_check(name: str, check: Callable[[Checked], str], subject: Checked) -> Result:
    """Runs one check. Whatever it raises, except Skipped, is a failure of what is checked."""
    asks = (check.__doc__ or "").strip().splitlines()[0]
    begun = time.perf_counter()
    status, figure, reason = PASS, "", ""
    try:
        figure = check(subject)
    except Skipped as skipped:
        status, reason = SKIP, str(skipped)
    except CheckFailed as failed:
        status, reason = FAIL, str(failed)
    except Exception as error:
        status, reason = FAIL, f"{type(error).__name__}: {' '.join(str(error).split())}"
    with contextlib.suppress(RuntimeError):
        gc.collect()
    return Result(name, status, asks, figure, reason, time.perf_counter() - begun)
