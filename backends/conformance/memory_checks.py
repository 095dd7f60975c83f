"""Checks of memory and graphs: free memory, release, the ledger, rollback, and running out of memory."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_result import CheckFailed, Skipped
from trencadis.backends.conformance.launch_harness import Harness
from trencadis.backends.conformance.program_checks import (
    describe_difference,
    equal_bits,
    filled_program,
    make_harness,
    pick_buckets,
)
from trencadis.backends.fault_injection_hooks import CAPTURE, STEP, hooks_of
from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import Bucket
from trencadis.core.device.backend import Backend, Program, ProgramState
from trencadis.core.errors import format_error, is_out_of_memory
from trencadis.core.graphs.graph_capture_within_memory_budget import GraphCaptures
from trencadis.core.graphs.graph_manager import GraphManager
from trencadis.core.memory.graph_selection import GraphPrice
from trencadis.core.memory.memory_division import GraphSettings, MemoryInUse, MemorySplit

MIB = 1 << 20
SLACK = 2 * MIB
"""Maximum difference in bytes between figures of memory: allocators round to pages."""


def memory(target: CheckTarget) -> str:
    """Free memory lies within the total, and falls by what is allocated."""
    backend = target.backend()
    total, free = backend.memory.total(), backend.memory.free()
    if not 0 < free <= total:
        raise CheckFailed(f"free {free}, total {total}")
    backed = backend.memory.real_kv_bytes()
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


def _is(program: Program, state: ProgramState) -> bool:
    """Compares the state in a function of its own, since mypy narrows ``program.state`` and does not see calls
    change it.
    """
    return program.state is state


def _free(backend: Backend) -> int:
    backend.synchronize()
    return backend.memory.free()


def release(target: CheckTarget) -> str:
    """``release`` returns the freed bytes, and the bucket stays compiled and correct."""
    harness = make_harness(target)
    backend, captured, came = harness.backend, 0, 0
    buckets = pick_buckets(harness, target, 3)
    for bucket in buckets:
        program, inputs, real = filled_program(harness, bucket)
        wanted = harness.launch(program, "run", real)
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
        found = harness.launch(program, "run", real)
        if not equal_bits(wanted, found):
            raise CheckFailed(f"{bucket}: after release its results change: {describe_difference(wanted, found)}")
    return f"{len(buckets)} buckets, {captured} of them captured; {came} bytes freed"


def _captures(harness: Harness, buckets: list[Bucket], budget: int) -> GraphCaptures:
    """Makes the captures for compiled ``buckets``, with ``budget`` bytes for each pool and a price of 1 byte per
    graph.
    """
    backend = harness.backend
    plan = Plan(backend.policy, buckets=tuple(sorted(buckets)), block_size=harness.block)
    manager = GraphManager(backend, harness.bodies, plan)
    for bucket in plan.buckets:
        manager.compile(bucket)
    total = backend.memory.total()
    before = MemoryInUse(total, others=total - _free(backend))
    division = MemorySplit(before.free, 3 * budget, 0, 0, budget, budget, budget)
    return GraphCaptures(
        manager, before, division, GraphSettings(), [GraphPrice(b, 1) for b in plan.buckets], multimodal=True
    )


def _graphs(target: CheckTarget) -> tuple[Harness, list[Bucket]]:
    harness = make_harness(target)
    if not harness.backend.policy.captures:
        raise Skipped("policy.captures is False")
    probe, _, _ = filled_program(harness, pick_buckets(harness, target, 1)[0])
    probe.compile()
    probe.capture()
    if not _is(probe, ProgramState.CAPTURED):
        raise Skipped("the device captures no graphs in this mode")
    probe.release()
    return harness, pick_buckets(harness, target, 3)


def ledger(target: CheckTarget) -> str:
    """The ledger's rows sum to the device's memory, and graphs cost what free memory falls by."""
    harness, buckets = _graphs(target)
    captures = _captures(harness, buckets, 1 << 40)
    start = _free(harness.backend)
    for bucket in captures.graphs.plan.buckets:
        captures.attempt(bucket)
        rows = dict(captures.ledger.rows())
        total = harness.backend.memory.total()
        if sum(rows.values()) != total:
            raise CheckFailed(f"{bucket}: the ledger's rows sum to {sum(rows.values())}, total memory is {total}")
        if below := [n for n, count in rows.items() if count < 0 and n != "margin"]:
            raise CheckFailed(f"{bucket}: row {below[0]} is negative")
    fell, booked = start - _free(harness.backend), sum(captures.costs.values())
    if abs(fell - booked) > SLACK + booked // 100:
        raise CheckFailed(f"the ledger books {booked} bytes for graphs; free memory fell by {fell}")
    held = captures.graphs.list_captured()
    short = [b for b in held if captures.graphs.program(b).bytes + SLACK < captures.costs[b]]
    if short:
        raise CheckFailed(f"{short[0]}: program.bytes is less than its graph cost")
    if captures.failed:
        bucket, why = next(iter(captures.failed.items()))
        raise CheckFailed(f"{bucket}: {why}")
    return f"{len(held)} graphs, {booked} bytes; rows sum to the device's memory after each"


def rollback(target: CheckTarget) -> str:
    """A graph that costs more than its pool is released; its bucket stays compiled and correct."""
    harness, buckets = _graphs(target)
    done = 0
    for bucket in buckets:
        inputs, real = harness.inputs(bucket, np.random.default_rng(3))
        captures = _captures(harness, [bucket], 1)
        program = captures.graphs.program(bucket)
        harness.backend.fill(program, inputs)
        wanted = harness.launch(program, "run", real)
        if captures.attempt(bucket):
            continue  # its size was too small to measure
        done += 1
        if not _is(program, ProgramState.COMPILED):
            raise CheckFailed(f"{bucket}: {program.state.name} after rollback, not COMPILED")
        harness.backend.fill(program, inputs)
        found = harness.launch(program, "run", real)
        if not equal_bits(wanted, found):
            raise CheckFailed(f"{bucket}: after rollback its results change: {describe_difference(wanted, found)}")
        if sum(dict(captures.ledger.rows()).values()) != harness.backend.memory.total():
            raise CheckFailed(f"{bucket}: after rollback the ledger's rows no longer sum to the device's memory")
    if not done:
        raise Skipped("no graph cost a measurable amount of memory")
    return f"{done} graphs rolled back"


def out_of_memory_in_capture(target: CheckTarget) -> str:
    """A capture that runs out of memory raises what the engine recognises, breaks nothing, and can be tried again."""
    harness, buckets = _graphs(target)
    run_out = hooks_of(harness.backend).run_out
    if run_out is None:
        raise Skipped("the backend offers no hooks.run_out")
    for bucket in buckets:
        program, inputs, real = filled_program(harness, bucket)
        wanted = harness.launch(program, "run", real)
        run_out(CAPTURE)
        _runs_out(bucket, program, "capture")
        if _is(program, ProgramState.CAPTURED):
            raise CheckFailed(f"{bucket}: CAPTURED after a capture that ran out of memory")
        harness.backend.fill(program, inputs)
        if not equal_bits(wanted, harness.launch(program, "run", real)):
            raise CheckFailed(f"{bucket}: its results change after a capture that ran out of memory")
        program.capture()
        # A capture may overwrite the inputs; the engine fills before each launch.
        harness.backend.fill(program, inputs)
        if not equal_bits(wanted, harness.launch(program, "replay", real)):
            raise CheckFailed(f"{bucket}: replay after a second capture gives other results")
        program.release()
    return f"{len(buckets)} captures failed and then succeeded"


def out_of_memory_in_step(target: CheckTarget) -> str:
    """A launch that runs out of memory raises what the engine recognises; run again, its result is correct."""
    harness = make_harness(target)
    run_out = hooks_of(harness.backend).run_out
    if run_out is None:
        raise Skipped("the backend offers no hooks.run_out")
    buckets = pick_buckets(harness, target, 2)
    for bucket in buckets:
        program, inputs, real = filled_program(harness, bucket)
        wanted = harness.launch(program, "run", real)
        harness.prepare(False)
        run_out(STEP)
        _runs_out(bucket, program, "run")
        harness.backend.fill(program, inputs)
        if not equal_bits(wanted, harness.launch(program, "run", real)):
            raise CheckFailed(f"{bucket}: its results change after a run that ran out of memory")
    return f"{len(buckets)} launches failed and then ran"


def _runs_out(bucket: Bucket, program: Program, what: str) -> None:
    """Calls ``program.what()``, which must raise an error that the engine recognises as out of memory."""
    try:
        getattr(program, what)()
    except Exception as error:
        if not is_out_of_memory(error):
            raise CheckFailed(
                f"{bucket}: {what} raised {format_error(error)}, which the engine does not recognise as out of memory"
            ) from error
    else:
        raise CheckFailed(f"{bucket}: {what} raised nothing although memory had run out")
