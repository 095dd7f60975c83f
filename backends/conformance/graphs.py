"""Memory and graphs: what is taken, what comes back, what the ledger makes of it, and what a lack of memory does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trencadis.backends.conformance.programs import chosen, differs, filled, rig_of, same
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
"""Allocators hand out pages: figures of memory may differ by one."""


def memory(subject: Subject) -> str:
    """Free memory lies within the total, and falls by what is taken."""
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
        raise CheckFailed(f"64 MiB were taken and free memory fell by {fell}")
    return f"total {total / 2**30:.1f} GiB, free {free / 2**30:.1f} GiB; 64 MiB taken, {fell / MIB:.0f} MiB fewer free"


def _is(program: Any, state: ProgramState) -> bool:
    """Asked again after each call; a type checker would think that a state never changes."""
    return bool(program.state is state)


def _free(backend: Any) -> int:
    backend.synchronize()
    free: int = backend.memory.free()
    return free


def release(subject: Subject) -> str:
    """``release`` returns the bytes that came back, and the bucket stays compiled and right."""
    rig = rig_of(subject)
    backend, captured, came = rig.backend, 0, 0
    buckets = chosen(rig, subject, 3)
    for bucket in buckets:
        program, inputs, real = filled(rig, bucket)
        wanted = rig.launch(program, "run", real)
        if program.bytes < 0:
            raise CheckFailed(f"{bucket}: bytes is {program.bytes}")
        if back := program.release():
            raise CheckFailed(f"{bucket}: release says that {back} bytes came back where there was no graph")
        backend.fill(program, inputs)
        program.run()
        program.capture()
        if _is(program, ProgramState.CAPTURED):
            captured += 1
            before = _free(backend)
            back = program.release()
            real_back = _free(backend) - before
            if abs(back - real_back) > SLACK + abs(real_back) // 20:
                raise CheckFailed(
                    f"{bucket}: release says that {back} bytes came back; free memory grew by {real_back}"
                )
            came += back
            if not _is(program, ProgramState.COMPILED):
                raise CheckFailed(f"{bucket}: {program.state.name} after release, not COMPILED")
            if back := program.release():
                raise CheckFailed(f"{bucket}: a second release says that {back} bytes came back")
        backend.fill(program, inputs)
        found = rig.launch(program, "run", real)
        if not same(wanted, found):
            raise CheckFailed(f"{bucket}: after a release it computes otherwise: {differs(wanted, found)}")
    return f"{len(buckets)} buckets, {captured} of them captured; {came} bytes came back"


def _captures(rig: Rig, buckets: list[Bucket], budget: int) -> Captures:
    """Captures over compiled ``buckets``, each pool holding ``budget`` bytes and each price being 1."""
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
        raise Skipped("the policy says that nothing is captured")
    probe, _, _ = filled(rig, chosen(rig, subject, 1)[0])
    probe.compile()
    probe.capture()
    if not _is(probe, ProgramState.CAPTURED):
        raise Skipped("the device makes no graphs in this mode")
    probe.release()
    return rig, chosen(rig, subject, 3)


def ledger(subject: Subject) -> str:
    """The ledger's rows sum to the device, and its graphs cost what free memory says."""
    rig, buckets = _graphs(subject)
    captures = _captures(rig, buckets, 1 << 40)
    start = _free(rig.backend)
    for bucket in captures.graphs.plan.buckets:
        captures.attempt(bucket)
        rows = dict(captures.ledger.rows())
        total = rig.backend.memory.total()
        if sum(rows.values()) != total:
            raise CheckFailed(f"{bucket}: the rows sum to {sum(rows.values())} of {total}")
        if below := [n for n, count in rows.items() if count < 0 and n != "margin"]:
            raise CheckFailed(f"{bucket}: row {below[0]} is below zero")
    fell, booked = start - _free(rig.backend), sum(captures.costs.values())
    if abs(fell - booked) > SLACK + booked // 100:
        raise CheckFailed(f"graphs are booked at {booked} bytes; free memory fell by {fell}")
    held = captures.graphs.captured()
    short = [b for b in held if captures.graphs.program(b).bytes + SLACK < captures.costs[b]]
    if short:
        raise CheckFailed(f"{short[0]}: bytes is less than its graph took")
    if captures.failed:
        bucket, why = next(iter(captures.failed.items()))
        raise CheckFailed(f"{bucket}: {why}")
    return f"{len(held)} graphs, {booked} bytes; rows sum to the device after each"


def rollback(subject: Subject) -> str:
    """A graph that costs more than its pool is given up; its bucket stays compiled and right."""
    rig, buckets = _graphs(subject)
    done = 0
    for bucket in buckets:
        inputs, real = rig.inputs(bucket, np.random.default_rng(3))
        captures = _captures(rig, [bucket], 1)
        program: Any = captures.graphs.program(bucket)
        rig.backend.fill(program, inputs)
        wanted = rig.launch(program, "run", real)
        if captures.attempt(bucket):
            continue  # it cost nothing that could be measured
        done += 1
        if not _is(program, ProgramState.COMPILED):
            raise CheckFailed(f"{bucket}: {program.state.name} after it was rolled back, not COMPILED")
        rig.backend.fill(program, inputs)
        found = rig.launch(program, "run", real)
        if not same(wanted, found):
            raise CheckFailed(f"{bucket}: rolled back, it computes otherwise: {differs(wanted, found)}")
        if sum(dict(captures.ledger.rows()).values()) != rig.backend.memory.total():
            raise CheckFailed(f"{bucket}: rolled back, the rows no longer sum to the device")
    if not done:
        raise Skipped("no graph cost memory that could be measured")
    return f"{done} graphs rolled back"


def out_of_memory_in_capture(subject: Subject) -> str:
    """A capture that finds no memory says so, takes nothing with it, and can be tried again."""
    rig, buckets = _graphs(subject)
    run_out = hooks_of(rig.backend).run_out
    if run_out is None:
        raise Skipped("the backend offers no hooks.run_out")
    for bucket in buckets:
        program, inputs, real = filled(rig, bucket)
        wanted = rig.launch(program, "run", real)
        run_out(CAPTURE)
        _runs_out(bucket, program, "capture")
        if _is(program, ProgramState.CAPTURED):
            raise CheckFailed(f"{bucket}: CAPTURED after a capture that ran out of memory")
        rig.backend.fill(program, inputs)
        if not same(wanted, rig.launch(program, "run", real)):
            raise CheckFailed(f"{bucket}: computes otherwise after a capture that ran out of memory")
        program.capture()
        # A capture may use the inputs for its own ends; the engine fills before each launch.
        rig.backend.fill(program, inputs)
        if not same(wanted, rig.launch(program, "replay", real)):
            raise CheckFailed(f"{bucket}: a second capture replays otherwise")
        program.release()
    return f"{len(buckets)} captures failed and were made again"


def out_of_memory_in_step(subject: Subject) -> str:
    """A launch that finds no memory says so; with a graph given up it runs, and its result is right."""
    rig = rig_of(subject)
    run_out = hooks_of(rig.backend).run_out
    if run_out is None:
        raise Skipped("the backend offers no hooks.run_out")
    buckets = chosen(rig, subject, 2)
    for bucket in buckets:
        program, inputs, real = filled(rig, bucket)
        wanted = rig.launch(program, "run", real)
        rig.prepare(False)
        run_out(STEP)
        _runs_out(bucket, program, "run")
        rig.backend.fill(program, inputs)
        if not same(wanted, rig.launch(program, "run", real)):
            raise CheckFailed(f"{bucket}: computes otherwise after a run that ran out of memory")
    return f"{len(buckets)} launches failed and ran again"


def _runs_out(bucket: Bucket, program: Any, what: str) -> None:
    """The call must raise what the engine takes for a lack of memory."""
    try:
        getattr(program, what)()
    except Exception as error:
        if not ran_out(error):
            raise CheckFailed(
                f"{bucket}: {what} raised {line(error)}, which does not say that memory ran out"
            ) from error
    else:
        raise CheckFailed(f"{bucket}: {what} went well where memory had run out")
