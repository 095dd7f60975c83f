"""Checks of memory and graphs: free memory, release, the ledger, rollback, and running out of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trencadis.backends.conformance.programs import (
    describe_difference,
    equal_bits,
    filled_program,
    pick_buckets,
    rig_of,
)
from trencadis.backends.conformance.result import CheckFailed, Skipped
from trencadis.backends.conformance.rig import Rig
from trencadis.backends.conformance.subject import Subject
from trencadis.backends.hooks import CAPTURE, STEP, hooks_of
from trencadis.core.backend import ProgramState
from trencadis.core.buckets import Bucket, Plan
from trencadis.core.graphs.capture import Captures
from trencadis.core.graphs.failures import line, ran_out
from trencadis.core.graphs.manager import GraphManager
from trencadis.core.memory.graph_budget import Price
from trencadis.core.memory.ledger import Before, Division, GraphSettings

MIB = 1 << 20
SLACK = 2 * MIB
"""Most bytes by which figures of memory may differ: allocators round to pages."""


def memory(subject: Subject) -> str:
    """Free memory lies within the total, and falls by what is allocated."""
    backend = subject.backend()
    total, free = backend.memory.total(), backend.memory.free()
    if not 0 < free <= total:
        raise CheckFailed(f"free {free}, total {total}")
    backed = backend.memory.backed()
    if backed is not None and backed < 0:
        raise CheckFailed(f"backed {backed}")
    if not backend.policy.captures or not backend.values:
        return f"total {total / 2**30:.1f} GiB, free {free / 2**30:.1f} GiB"
    held = backend.zeros((64 * MIB,), torch.uint8)
    held.copy_(torch.ones(64 * MIB, dtype=torch.uint8))
    backend.synchronize()
    fell = free - backend.memory.free()
    if hooks_of(backend).run_out is not None and not 64 * MIB <= fell <= 66 * MIB:
        raise CheckFailed(f"64 MiB were allocated, but free memory fell by {fell} bytes")
    return (
        f"total {total / 2**30:.1f} GiB, free {free / 2**30:.1f} GiB; 64 MiB allocated, {fell / MIB:.0f} MiB fewer free"
    )


def _is(program: Any, state: ProgramState) -> bool:
    """A function, because mypy narrows ``program.state`` and does not see calls change it."""
    return bool(program.state is state)


def _free(backend: Any) -> int:
    backend.synchronize()
    free: int = backend.memory.free()
    return free


def release(subject: Subject) -> str:
    """``release`` returns the freed bytes, and the bucket stays compiled and correct."""
    rig = rig_of(subject)
    backend, captured, came = rig.backend, 0, 0
    buckets = pick_buckets(rig, subject, 3)
    for bucket in buckets:
        program, inputs, real = filled_program(rig, bucket)
        wanted = rig.launch(program, "run", real)
        if program.bytes < 0:
            raise CheckFailed(f"{bucket}: bytes is {program.bytes}")
        if back := program.release():
            raise CheckFailed(f"{bucket}: release returned {back} bytes although there was no graph")
        backend.fill(program, inputs)
        program.run()
        program.capture()
        if _is(program, ProgramState.CAPTURED):
            captured += 1
            before = _free(backend)
            back = program.release()
            real_back = _free(backend) - before
            if abs(back - real_back) > SLACK + abs(real_back) // 20:
                raise CheckFailed(f"{bucket}: release returned {back} bytes; free memory grew by {real_back}")
            came += back
            if not _is(program, ProgramState.COMPILED):
                raise CheckFailed(f"{bucket}: {program.state.name} after release, not COMPILED")
            if back := program.release():
                raise CheckFailed(f"{bucket}: a second release returned {back} bytes")
        backend.fill(program, inputs)
        found = rig.launch(program, "run", real)
        if not equal_bits(wanted, found):
            raise CheckFailed(f"{bucket}: after release its results change: {describe_difference(wanted, found)}")
    return f"{len(buckets)} buckets, {captured} of them captured; {came} bytes freed"


def _captures(rig: Rig, buckets: list[Bucket], budget: int) -> Captures:
    """Captures for compiled ``buckets``, with ``budget`` bytes for each pool and a price of 1 byte for each graph."""
    backend: Any = rig.backend
    plan = Plan(backend.policy, buckets=tuple(sorted(buckets)), block_size=rig.block)
    manager = GraphManager(backend, rig.bodies, plan)
    for bucket in plan.buckets:
        manager.compile(bucket)
    total = backend.memory.total()
    before = Before(total, others=total - _free(backend))
    division = Division(before.free, 3 * budget, 0, 0, budget, budget, budget)
    return Captures(manager, before, division, GraphSettings(), [Price(b, 1) for b in plan.buckets], multimodal=True)


def _graphs(subject: Subject) -> tuple[Rig, list[Bucket]]:
    rig = rig_of(subject)
    if not rig.backend.policy.captures:
        raise Skipped("policy.captures is False")
    probe, _, _ = filled_program(rig, pick_buckets(rig, subject, 1)[0])
    probe.compile()
    probe.capture()
    if not _is(probe, ProgramState.CAPTURED):
        raise Skipped("the device captures no graphs in this mode")
    probe.release()
    return rig, pick_buckets(rig, subject, 3)


def ledger(subject: Subject) -> str:
    """The ledger's rows sum to the device's memory, and graphs cost what free memory falls by."""
    rig, buckets = _graphs(subject)
    captures = _captures(rig, buckets, 1 << 40)
    start = _free(rig.backend)
    for bucket in captures.graphs.plan.buckets:
        captures.attempt(bucket)
        rows = dict(captures.ledger.rows())
        total = rig.backend.memory.total()
        if sum(rows.values()) != total:
            raise CheckFailed(f"{bucket}: the ledger's rows sum to {sum(rows.values())}, total memory is {total}")
        if below := [n for n, count in rows.items() if count < 0 and n != "margin"]:
            raise CheckFailed(f"{bucket}: row {below[0]} is negative")
    fell, booked = start - _free(rig.backend), sum(captures.costs.values())
    if abs(fell - booked) > SLACK + booked // 100:
        raise CheckFailed(f"the ledger books {booked} bytes for graphs; free memory fell by {fell}")
    held = captures.graphs.captured()
    short = [b for b in held if captures.graphs.program(b).bytes + SLACK < captures.costs[b]]
    if short:
        raise CheckFailed(f"{short[0]}: program.bytes is less than its graph cost")
    if captures.failed:
        bucket, why = next(iter(captures.failed.items()))
        raise CheckFailed(f"{bucket}: {why}")
    return f"{len(held)} graphs, {booked} bytes; rows sum to the device's memory after each"


def rollback(subject: Subject) -> str:
    """A graph that costs more than its pool is released; its bucket stays compiled and correct."""
    rig, buckets = _graphs(subject)
    done = 0
    for bucket in buckets:
        inputs, real = rig.inputs(bucket, np.random.default_rng(3))
        captures = _captures(rig, [bucket], 1)
        program: Any = captures.graphs.program(bucket)
        rig.backend.fill(program, inputs)
        wanted = rig.launch(program, "run", real)
        if captures.attempt(bucket):
            continue  # its cost was too small to measure
        done += 1
        if not _is(program, ProgramState.COMPILED):
            raise CheckFailed(f"{bucket}: {program.state.name} after rollback, not COMPILED")
        rig.backend.fill(program, inputs)
        found = rig.launch(program, "run", real)
        if not equal_bits(wanted, found):
            raise CheckFailed(f"{bucket}: after rollback its results change: {describe_difference(wanted, found)}")
        if sum(dict(captures.ledger.rows()).values()) != rig.backend.memory.total():
            raise CheckFailed(f"{bucket}: after rollback the ledger's rows no longer sum to the device's memory")
    if not done:
        raise Skipped("no graph cost a measurable amount of memory")
    return f"{done} graphs rolled back"


def out_of_memory_in_capture(subject: Subject) -> str:
    """A capture that runs out of memory raises what the engine recognises, breaks nothing, and can be tried again."""
    rig, buckets = _graphs(subject)
    run_out = hooks_of(rig.backend).run_out
    if run_out is None:
        raise Skipped("the backend offers no hooks.run_out")
    for bucket in buckets:
        program, inputs, real = filled_program(rig, bucket)
        wanted = rig.launch(program, "run", real)
        run_out(CAPTURE)
        _runs_out(bucket, program, "capture")
        if _is(program, ProgramState.CAPTURED):
            raise CheckFailed(f"{bucket}: CAPTURED after a capture that ran out of memory")
        rig.backend.fill(program, inputs)
        if not equal_bits(wanted, rig.launch(program, "run", real)):
            raise CheckFailed(f"{bucket}: its results change after a capture that ran out of memory")
        program.capture()
        # A capture may overwrite the inputs; the engine fills before each launch.
        rig.backend.fill(program, inputs)
        if not equal_bits(wanted, rig.launch(program, "replay", real)):
            raise CheckFailed(f"{bucket}: replay after a second capture gives other results")
        program.release()
    return f"{len(buckets)} captures failed and then succeeded"


def out_of_memory_in_step(subject: Subject) -> str:
    """A launch that runs out of memory raises what the engine recognises; run again, its result is correct."""
    rig = rig_of(subject)
    run_out = hooks_of(rig.backend).run_out
    if run_out is None:
        raise Skipped("the backend offers no hooks.run_out")
    buckets = pick_buckets(rig, subject, 2)
    for bucket in buckets:
        program, inputs, real = filled_program(rig, bucket)
        wanted = rig.launch(program, "run", real)
        rig.prepare(False)
        run_out(STEP)
        _runs_out(bucket, program, "run")
        rig.backend.fill(program, inputs)
        if not equal_bits(wanted, rig.launch(program, "run", real)):
            raise CheckFailed(f"{bucket}: its results change after a run that ran out of memory")
    return f"{len(buckets)} launches failed and then ran"


def _runs_out(bucket: Bucket, program: Any, what: str) -> None:
    """Calls ``program.what()``, which must raise what the engine recognises as out of memory."""
    try:
        getattr(program, what)()
    except Exception as error:
        if not ran_out(error):
            raise CheckFailed(
                f"{bucket}: {what} raised {line(error)}, which the engine does not recognise as out of memory"
            ) from error
    else:
        raise CheckFailed(f"{bucket}: {what} raised nothing although memory had run out")
