"""Programs over a real model: padding, replay, refill, repetition, shapes, waiting. Equal means equal bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from trencadis.backends.conformance.result import CheckFailed, Skipped
from trencadis.backends.conformance.rig import Rig, every, some
from trencadis.backends.conformance.subject import Subject
from trencadis.backends.hooks import hooks_of
from trencadis.core.backend import ProgramState
from trencadis.core.buckets import Bucket, Stage, padded_tokens

PER_STAGE, PER_STAGE_QUICK = 12, 3


def rig_of(subject: Subject) -> Rig:
    """A backend of its own with the model; a process may have one device at a time, so none is shared."""
    rig = Rig(subject.model, subject.backend(), subject.block_size)
    if not rig.backend.values:
        raise Skipped("this device keeps shapes alone (Backend.values is False): there is nothing to compare")
    return rig


def chosen(rig: Rig, subject: Subject, most: int = PER_STAGE) -> list[Bucket]:
    """Buckets of every stage."""
    count = min(most, PER_STAGE_QUICK) if subject.quick else most
    found = [b for stage in rig.stages for b in some(every(rig.plan, stage), count)]
    if not found:
        raise CheckFailed("the policy names no stages")
    return found


def filled(rig: Rig, bucket: Bucket, seed: int = 3) -> tuple[Any, Any, int]:
    """(program, the inputs it was filled with, rows)."""
    inputs, real = rig.inputs(bucket, np.random.default_rng(seed))
    program = rig.backend.program(bucket, rig.body(bucket))
    rig.backend.fill(program, inputs)
    return program, inputs, real


def same(one: list[Any], other: list[Any]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def differs(one: list[Any], other: list[Any]) -> str:
    """Which result differs most, for a message."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.shape != b.shape:
            return f"result {i}: shape {list(a.shape)} and {list(b.shape)}"
        if not torch.equal(a, b):
            gap = (a.double() - b.double()).abs()
            most = float(gap.nan_to_num(float("inf")).max())
            return f"result {i} of {len(one)}: {int((gap != 0).sum())} values differ, most by {most:.3g}"
    return "another number of results"


def padding(subject: Subject) -> str:
    """NaN in SINK and junk in padding change no bit of a real row."""
    rig = rig_of(subject)
    shown = 0
    buckets = chosen(rig, subject)
    for bucket in buckets:
        program, _, real = filled(rig, bucket)
        clean = rig.launch(program, "run", real)
        if not any(torch.isfinite(t.float()).all() and bool(t.any()) for t in clean):
            raise CheckFailed(f"{bucket}: the launch left nothing but zeros or NaN")
        program, inputs, real = filled(rig, bucket)
        shown += rig.junk(program, inputs)
        poisoned = rig.launch(program, "run", real, poison=True)
        if not same(clean, poisoned):
            raise CheckFailed(f"{bucket}: padding, SINK or slot 0 reaches real rows: {differs(clean, poisoned)}")
    note = "" if shown == len(buckets) else f"; {len(buckets) - shown} show no Program.inputs: SINK and slot 0 alone"
    return f"{len(buckets)} buckets{note}"


def replay(subject: Subject) -> str:
    """A captured program replays what a run of the same inputs gives, and follows each new fill."""
    rig, captured = rig_of(subject), 0
    buckets = chosen(rig, subject)
    for bucket in buckets:
        wanted = {}
        for seed in (3, 4):
            program, _, real = filled(rig, bucket, seed)
            wanted[seed] = rig.launch(program, "run", real)
        program, _, real = filled(rig, bucket, 3)
        rig.prepare(False)
        program.run()
        program.capture()
        captured += program.state is ProgramState.CAPTURED
        for seed in (3, 4, 3):
            inputs, real = rig.inputs(bucket, np.random.default_rng(seed))
            rig.backend.fill(program, inputs)
            found = rig.launch(program, "replay", real)
            if not same(wanted[seed], found):
                stale = seed == 4 and same(wanted[3], found)
                what = "replays the inputs of an earlier fill" if stale else differs(wanted[seed], found)
                raise CheckFailed(f"{bucket}: replay is not run: {what}")
        program.release()
    if rig.backend.policy.captures and not captured:
        return f"{len(buckets)} buckets; the device made no graph in this mode"
    return f"{len(buckets)} buckets, {captured} captured"


def refill(subject: Subject) -> str:
    """A program that was filled before gives what a new one gives: nothing of the earlier launch stays."""
    rig = rig_of(subject)
    buckets = chosen(rig, subject, 4)
    for bucket in buckets:
        fresh, inputs, real = filled(rig, bucket, 4)
        wanted = rig.launch(fresh, "run", real)
        used, _, first = filled(rig, bucket, 3)
        before = rig.launch(used, "run", first)
        rig.backend.fill(used, inputs)
        found = rig.launch(used, "run", real)
        if not same(wanted, found):
            what = "its outputs are those of the earlier fill" if same(before, found) else differs(wanted, found)
            raise CheckFailed(f"{bucket}: a second fill is not a first one: {what}")
    return f"{len(buckets)} buckets"


def determinism(subject: Subject) -> str:
    """The same launch gives the same bits each time."""
    rig, times = rig_of(subject), 3
    buckets = chosen(rig, subject, 4)
    for bucket in buckets:
        program, _, real = filled(rig, bucket)
        first = rig.launch(program, "run", real)
        for _ in range(times - 1):
            again = rig.launch(program, "run", real)
            if not same(first, again):
                raise CheckFailed(f"{bucket}: the same launch gave other bits: {differs(first, again)}")
    return f"{len(buckets)} buckets, {times} times each"


class Recording:
    """Ops that note the shapes of what passes through them."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.seen: Counter[Any] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if not callable(found) or name in ("pack_weight", "layer", "cut"):
            return found

        def noted(*args: Any, **kwargs: Any) -> Any:
            out = found(*args, **kwargs)
            shapes = tuple(tuple(t.shape) for t in _tensors((args, tuple(kwargs.values()), out)))
            self.seen[name, shapes] += 1
            return out

        return noted


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)


def shapes(subject: Subject) -> str:
    """A launch computes at its bucket's shape, whatever it holds; no program is of another bucket."""
    backend: Any = subject.backend()
    recording = Recording(backend.ops)
    backend.ops = recording
    rig = Rig(subject.model, backend, subject.block_size)
    buckets = chosen(rig, subject, 4)
    for bucket in buckets:
        program = backend.program(bucket, rig.body(bucket))
        if program.bucket != bucket:
            raise CheckFailed(f"{bucket}: its program is one of {program.bucket}")
        seen = []
        for smaller in (False, True):
            recording.seen.clear()
            inputs, _ = rig.inputs(_least(bucket) if smaller else bucket, np.random.default_rng(3))
            backend.fill(program, inputs)
            rig.prepare(False)
            program.run()
            seen.append(dict(recording.seen))
            _leading(bucket, recording.seen)
        if rig.backend.policy.captures and seen[0] != seen[1]:
            other = next(iter(set(seen[0]) ^ set(seen[1])))
            raise CheckFailed(f"{bucket}: shapes follow what the launch holds: {other[0]} of {other[1]}")
    if rig.plan.buckets and set(rig.backend.policy.axes) < {b.stage for b in rig.plan.buckets}:
        raise CheckFailed("the plan has stages that the policy does not name")
    return f"{len(buckets)} buckets, full and nearly empty" + _compiled(rig, subject)


def _least(bucket: Bucket) -> Bucket:
    """A need of one row or window that the bucket holds."""
    dims = {Stage.VISION: (min(bucket.dims[0], 64),), Stage.PREFILL: (1, 1), Stage.FRESH: (1, 1), Stage.CONTEXT: (1, 1)}
    small = dims.get(bucket.stage, (1,) * len(bucket.dims))
    if bucket.stage is Stage.VISION:
        return bucket  # model.pack pads to the bucket itself
    return Bucket(bucket.stage, small, bucket.variant)


def _leading(bucket: Bucket, seen: Counter[Any]) -> None:
    """The first op of a body runs over as many tokens, slots or rows as the bucket has."""
    first = {Stage.VISION: "patches", Stage.SAMPLE: "sample", Stage.RESET: "reset"}.get(bucket.stage, "embed")
    found = [dims for name, dims in seen if name == first]
    if not found:
        raise CheckFailed(f"{bucket}: the body never called ops.{first}")
    if found[0][0][0] != padded_tokens(bucket):
        raise CheckFailed(
            f"{bucket}: ops.{first} saw {found[0][0][0]} where the bucket has {padded_tokens(bucket)}: "
            "a shape outside the plan"
        )


def _compiled(rig: Rig, subject: Subject) -> str:
    """Once every bucket has run, more launches of them compile nothing."""
    backend = rig.backend
    buckets = chosen(rig, subject, 3)
    programs = {b: filled(rig, b)[0] for b in buckets}
    for bucket, program in programs.items():
        # Again: buckets may share the memory of their inputs.
        backend.fill(program, rig.inputs(bucket, np.random.default_rng(4))[0])
        rig.prepare(False)
        program.compile()
        program.run()
    before = backend.compilations()
    for seed in (5, 6):
        for bucket, program in programs.items():
            inputs, _ = rig.inputs(bucket, np.random.default_rng(seed))
            backend.fill(program, inputs)
            rig.prepare(False)
            program.run()
    made = backend.compilations() - before
    if made:
        raise CheckFailed(f"{made} compilations after every bucket was compiled and had run")
    return f"; {before} compilations, then none"


def waiting(subject: Subject) -> str:
    """No launch waits for the device."""
    rig = rig_of(subject)
    guard = hooks_of(rig.backend).no_sync
    if guard is None:
        raise Skipped("the backend offers no hooks.no_sync")
    buckets = chosen(rig, subject, 3)
    for bucket in buckets:
        program, _, _ = filled(rig, bucket)
        rig.prepare(False)
        program.compile()
        _held(bucket, "run", guard, program.run)
        program.capture()
        _held(bucket, "replay", guard, program.replay)
        program.release()
    return f"{len(buckets)} buckets, run and replayed"


def _held(bucket: Bucket, what: str, guard: Callable[[], Any], launch: Callable[[], Any]) -> None:
    try:
        with guard() or nullcontext():
            launch()
    except Exception as error:
        raise CheckFailed(f"{bucket}: {what} waits for the device: {type(error).__name__}: {error}") from error
