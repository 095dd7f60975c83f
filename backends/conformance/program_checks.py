"""Checks of programs that run a real model: padding, replay, refill, determinism, shapes, waiting; all bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import CheckFailed, Skipped
from trencadis.backends.conformance.launch_harness import Harness, all_buckets, spread_buckets
from trencadis.backends.fault_injection_hooks import hooks_of
from trencadis.core.buckets import Bucket, Stage, padded_tokens
from trencadis.core.device.backend import Backend, Ops, Program, ProgramState

PER_STAGE, PER_STAGE_QUICK = 12, 3


def make_harness(target: CheckTarget, backend: Backend | None = None) -> Harness:
    """Makes a new backend with the model. Backends are not shared: a process may hold one device at a time."""
    harness = Harness(target.model, backend or target.backend(), target.block_size)
    if not harness.backend.values:
        raise Skipped("this device computes shapes only (Backend.values is False): there is nothing to compare")
    return harness


def pick_buckets(harness: Harness, target: CheckTarget, most: int = PER_STAGE) -> list[Bucket]:
    """Returns up to ``most`` buckets of each stage."""
    count = min(most, PER_STAGE_QUICK) if target.quick else most
    found = [
        b for stage in harness.stages for b in spread_buckets(all_buckets(harness.plan, stage, harness.tile), count)
    ]
    if not found:
        raise CheckFailed("the policy names no stages")
    return found


class FilledProgram(NamedTuple):
    """A program whose buffers hold ``inputs``, which have ``rows`` rows."""

    program: Program
    inputs: Any
    rows: int


def filled_program(harness: Harness, bucket: Bucket, seed: int = 3) -> FilledProgram:
    """Makes a program and fills it."""
    inputs, real = harness.inputs(bucket, np.random.default_rng(seed))
    program = harness.backend.program(bucket, harness.body(bucket))
    harness.backend.fill(program, inputs)
    return FilledProgram(program, inputs, real)


def equal_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """Returns True if two lists of tensors are equal bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def describe_difference(one: list[Tensor], other: list[Tensor]) -> str:
    """Describes the first result that differs, for a message."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.shape != b.shape:
            return f"result {i}: shape {list(a.shape)} and {list(b.shape)}"
        if not torch.equal(a, b):
            gap = (a.double() - b.double()).abs()
            most = float(gap.nan_to_num(float("inf")).max())
            return f"result {i} of {len(one)}: {int((gap != 0).sum())} values differ, most by {most:.3g}"
    return "the number of results differs"


def padding(target: CheckTarget) -> str:
    """NaN in SINK and junk in padding change no bit of a real row."""
    harness = make_harness(target)
    shown = 0
    buckets = pick_buckets(harness, target)
    for bucket in buckets:
        program, _, real = filled_program(harness, bucket)
        clean = harness.launch(program, "run", real)
        if not any(torch.isfinite(t.float()).all() and bool(t.any()) for t in clean):
            raise CheckFailed(f"{bucket}: the launch wrote only zeros or NaN")
        program, inputs, real = filled_program(harness, bucket)
        shown += harness.junk(program, inputs)
        poisoned = harness.launch(program, "run", real, poison=True)
        if not equal_bits(clean, poisoned):
            raise CheckFailed(
                f"{bucket}: padding, SINK or slot 0 changes real rows: {describe_difference(clean, poisoned)}"
            )
    note = (
        "" if shown == len(buckets) else f"; {len(buckets) - shown} hide Program.inputs: SINK and slot 0 alone tested"
    )
    return f"{len(buckets)} buckets{note}"


def replay(target: CheckTarget) -> str:
    """A captured program's replay equals a run of the same inputs, and follows each new fill."""
    harness, captured = make_harness(target), 0
    buckets = pick_buckets(harness, target)
    for bucket in buckets:
        wanted = {}
        for seed in (3, 4):
            program, _, real = filled_program(harness, bucket, seed)
            wanted[seed] = harness.launch(program, "run", real)
        program, _, real = filled_program(harness, bucket, 3)
        harness.prepare(False)
        program.run()
        program.capture()
        captured += program.state is ProgramState.CAPTURED
        for seed in (3, 4, 3):
            inputs, real = harness.inputs(bucket, np.random.default_rng(seed))
            harness.backend.fill(program, inputs)
            found = harness.launch(program, "replay", real)
            if not equal_bits(wanted[seed], found):
                stale = seed == 4 and equal_bits(wanted[3], found)
                what = "replays the inputs of an earlier fill" if stale else describe_difference(wanted[seed], found)
                raise CheckFailed(f"{bucket}: replay differs from run: {what}")
        program.release()
    if harness.backend.policy.captures and not captured:
        return f"{len(buckets)} buckets; the device captures no graphs in this mode"
    return f"{len(buckets)} buckets, {captured} captured"


def refill(target: CheckTarget) -> str:
    """A program that is filled again gives what a new one gives: nothing of the earlier launch stays."""
    harness = make_harness(target)
    buckets = pick_buckets(harness, target, 4)
    for bucket in buckets:
        fresh, inputs, real = filled_program(harness, bucket, 4)
        wanted = harness.launch(fresh, "run", real)
        used, _, first = filled_program(harness, bucket, 3)
        before = harness.launch(used, "run", first)
        harness.backend.fill(used, inputs)
        found = harness.launch(used, "run", real)
        if not equal_bits(wanted, found):
            what = (
                "its outputs are those of the earlier fill"
                if equal_bits(before, found)
                else describe_difference(wanted, found)
            )
            raise CheckFailed(f"{bucket}: a second fill differs from a first one: {what}")
    return f"{len(buckets)} buckets"


def determinism(target: CheckTarget) -> str:
    """The same launch gives the same bits each time."""
    harness, times = make_harness(target), 3
    buckets = pick_buckets(harness, target, 4)
    for bucket in buckets:
        program, _, real = filled_program(harness, bucket)
        first = harness.launch(program, "run", real)
        for _ in range(times - 1):
            again = harness.launch(program, "run", real)
            if not equal_bits(first, again):
                raise CheckFailed(f"{bucket}: the same launch gave other bits: {describe_difference(first, again)}")
    return f"{len(buckets)} buckets, {times} times each"


RecordedCall = tuple[str, tuple[tuple[int, ...], ...]]
"""An op's name and the shapes of its arguments and results."""


class RecordingOps:
    """Ops that record the shapes of their arguments and results."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.seen: Counter[RecordedCall] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if not callable(found) or name in ("pack_weight", "pack_quantised", "layer", "region", "cut"):
            return found

        def record(*args: object, **kwargs: object) -> object:
            out = found(*args, **kwargs)
            shapes = tuple(tuple(t.shape) for t in _tensors((args, tuple(kwargs.values()), out)))
            self.seen[name, shapes] += 1
            return out

        return record


def _tensors(tree: object) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)


def shapes(target: CheckTarget) -> str:
    """A launch computes at its bucket's shape, however few rows it holds, and each program has its own bucket."""
    backend = target.backend()
    if backend.policy.graphless:
        raise Skipped("ops are compiled and not called in this mode, where another shape is a counted compilation")
    recording = RecordingOps(backend.ops)
    backend.ops = cast(Ops, recording)
    harness = Harness(target.model, backend, target.block_size)
    buckets = pick_buckets(harness, target, 4)
    for bucket in buckets:
        program = backend.program(bucket, harness.body(bucket))
        if program.bucket != bucket:
            raise CheckFailed(f"{bucket}: its program states bucket {program.bucket}")
        seen = []
        for smaller in (False, True):
            recording.seen.clear()
            inputs, _ = harness.inputs(_small_need(bucket) if smaller else bucket, np.random.default_rng(3))
            backend.fill(program, inputs)
            harness.prepare(False)
            program.run()
            seen.append(dict(recording.seen))
            _check_first_op(bucket, recording.seen)
        if harness.backend.policy.captures and seen[0] != seen[1]:
            other = next(iter(set(seen[0]) ^ set(seen[1])))
            raise CheckFailed(f"{bucket}: shapes depend on how many rows the launch holds: {other[0]} of {other[1]}")
    if harness.plan.buckets and set(harness.backend.policy.axes) < {b.stage for b in harness.plan.buckets}:
        raise CheckFailed("the plan has stages that policy.axes lacks")
    return f"{len(buckets)} buckets, full and nearly empty" + _check_compilations(harness, target)


def _small_need(bucket: Bucket) -> Bucket:
    """Returns the need of one row or window that fits the bucket."""
    dims = {Stage.VISION: (min(bucket.dims[0], 64),), Stage.PREFILL: (1, 1), Stage.FRESH: (1, 1), Stage.CONTEXT: (1, 1)}
    small = dims.get(bucket.stage, (1,) * len(bucket.dims))
    if bucket.stage is Stage.VISION:
        return bucket  # model.pack pads to the bucket's size
    return Bucket(bucket.stage, small, bucket.variant)


def _check_first_op(bucket: Bucket, recorded_shapes: Counter[RecordedCall]) -> None:
    """Raises CheckFailed unless the first op of a body runs over as many tokens, slots or rows as the bucket has."""
    sampling = {"draw": "draw", "penalised": "take_penalised"}.get(bucket.variant, "sample")
    first = {Stage.VISION: "patches", Stage.SAMPLE: sampling, Stage.RESET: "reset", Stage.POOL: "pool"}.get(
        bucket.stage, "embed"
    )
    names = (first, "take") if first == "sample" else (first,)  # a head that stores no logits takes their best ids
    found = [dims for name, dims in recorded_shapes if name in names]
    if not found:
        raise CheckFailed(f"{bucket}: the body never calls ops.{first}")
    if found[0][0][0] != padded_tokens(bucket):
        raise CheckFailed(
            f"{bucket}: ops.{first} ran over {found[0][0][0]}, but the bucket has {padded_tokens(bucket)}: "
            "a shape outside the plan"
        )


def _check_compilations(harness: Harness, target: CheckTarget) -> str:
    """Raises CheckFailed if launches still compile after every bucket has run; returns a part of the figure."""
    backend = harness.backend
    buckets = pick_buckets(harness, target, 3)
    programs = {b: filled_program(harness, b)[0] for b in buckets}
    for bucket, program in programs.items():
        # Filled again, because buckets may share the memory of their inputs.
        backend.fill(program, harness.inputs(bucket, np.random.default_rng(4))[0])
        harness.prepare(False)
        program.compile()
        program.run()
    before = backend.compilations()
    for seed in (5, 6):
        for bucket, program in programs.items():
            inputs, _ = harness.inputs(bucket, np.random.default_rng(seed))
            backend.fill(program, inputs)
            harness.prepare(False)
            program.run()
    made = backend.compilations() - before
    if made:
        raise CheckFailed(f"{made} compilations after every bucket had been compiled and run")
    return f"; {before} compilations, then none"


def waiting(target: CheckTarget) -> str:
    """Checks that no launch waits for the device."""
    harness = make_harness(target)
    guard = hooks_of(harness.backend).no_sync
    if guard is None:
        raise Skipped("the backend offers no hooks.no_sync")
    buckets = pick_buckets(harness, target, 3)
    for bucket in buckets:
        program, _, _ = filled_program(harness, bucket)
        harness.prepare(False)
        program.compile()
        _check_no_wait(bucket, "run", guard, program.run)
        program.capture()
        _check_no_wait(bucket, "replay", guard, program.replay)
        program.release()
    return f"{len(buckets)} buckets, run and replayed"


def _check_no_wait(
    bucket: Bucket, what: str, guard: Callable[[], AbstractContextManager[object]], launch: Callable[[], object]
) -> None:
    try:
        with guard() or nullcontext():
            launch()
    except Exception as error:
        raise CheckFailed(f"{bucket}: {what} waits for the device: {type(error).__name__}: {error}") from error
