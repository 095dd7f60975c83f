"""Programs by bucket and how far each is prepared: PLANNED -> COMPILED -> CAPTURED. Runs them and counts.

On a device that captures nothing every size may be its own bucket; programs are then kept while they are used.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trencadis.core.backend import Backend, Body, Inputs, Program, ProgramState
from trencadis.core.buckets import Bucket, Plan, Stage, padded_tokens
from trencadis.core.graphs.failures import line, ran_out
from trencadis.core.graphs.misses import SKIP, UNPLANNED
from trencadis.core.step import StepStats

log = logging.getLogger("trencadis.engine")

T = TypeVar("T")

KEPT = 8
"""Programs outside the plan that are kept; the oldest go first. Each holds its last inputs, pixels and all."""

BODIES = {Stage.VISION: "vision", Stage.RESET: "reset"}


def body_of(bucket: Bucket) -> str:
    """Name of the body that a bucket runs."""
    return bucket.variant or BODIES.get(bucket.stage, "text")


class GraphManager:
    """One Program per bucket of one backend.

    ``first_use`` is called with a planned bucket that is needed before anybody prepared it, once it is compiled.
    """

    def __init__(self, backend: Backend, bodies: Mapping[str, Body], plan: Plan) -> None:
        self.backend, self.plan = backend, plan
        self.counted = backend.policy.captures
        self.planned = frozenset(plan.buckets)
        self.hits: Counter[Bucket] = Counter()
        self.took: dict[Bucket, float] = {}
        """Seconds of compiling each bucket."""
        self.lazy_compiles = 0
        self.recompiles = 0
        self.changes = 0
        """Grows with every change of a program's state, so that readers know when to look again."""
        self.first_use: Callable[[Bucket], None] = lambda bucket: None
        self.enter: Callable[[str], str] = lambda phase: phase
        """Told what goes on; returns what went on before."""
        self.released: Callable[[Bucket, int], None] = lambda bucket, returned: None
        self.cold = SKIP
        """Why a planned bucket may be met that nobody has compiled yet."""
        self.lacking: Callable[[Bucket], str] = lambda bucket: self.cold
        """Why a compiled bucket has no graph."""
        self._bodies = bodies
        self._programs: dict[Bucket, Program] = {}
        self._passing: OrderedDict[Bucket, Program] = OrderedDict()
        self._known = backend.compilations()

    def program(self, bucket: Bucket) -> Program:
        """The program of ``bucket``, made where there is none yet."""
        if bucket in self.planned:
            program = self._programs.get(bucket)
            if program is None:
                program = self._programs[bucket] = self.make(bucket)
            return program
        program = self._passing.get(bucket)
        if program is None:
            program = self._passing[bucket] = self.make(bucket)
            if len(self._passing) > KEPT:
                self._passing.popitem(last=False)[1].release()
        else:
            self._passing.move_to_end(bucket)
        return program

    def make(self, bucket: Bucket) -> Program:
        """A program of its own for ``bucket``, known to nobody else."""
        return self.backend.program(bucket, self._bodies[body_of(bucket)])

    def state(self, bucket: Bucket) -> ProgramState:
        """How far a planned bucket is prepared."""
        program = self._programs.get(bucket)
        return ProgramState.PLANNED if program is None else program.state

    def captured(self) -> list[Bucket]:
        """Planned buckets that have a graph."""
        return [b for b, p in list(self._programs.items()) if p.state is ProgramState.CAPTURED]

    def run(self, bucket: Bucket, inputs: Inputs, real: int) -> tuple[Any, StepStats]:
        """Runs one launch of ``real`` tokens, slots or rows: the graph where there is one, else the compiled body."""
        start = time.perf_counter()
        program = self.program(bucket)
        first = self.counted and program.state is ProgramState.PLANNED
        if first:
            self._prepare(bucket)
        self.backend.fill(program, inputs)
        out = self._launch(program)
        planned = not self.planned or bucket in self.planned
        miss = ""
        if self.counted:
            self.hits[bucket] += 1
            miss = self._miss(bucket, program, first)
        seconds = time.perf_counter() - start
        return out, StepStats(bucket, real, padded_tokens(bucket), program.state.name, seconds, planned, miss)

    def _miss(self, bucket: Bucket, program: Program, first: bool) -> str:
        """Why this launch had no graph ready; empty where it had. One made by its own launch was not ready."""
        if bucket not in self.planned:
            return UNPLANNED
        if first:
            return self.cold
        return "" if program.state is ProgramState.CAPTURED else self.lacking(bucket)

    def _prepare(self, bucket: Bucket) -> None:
        """A need met a program that nobody compiled."""
        self.lazy_compiles += 1
        if bucket not in self.planned:
            log.warning("%s is outside the plan and is compiled now", bucket)
        self._patiently(bucket, lambda: self.compile(bucket))
        if bucket in self.planned:
            self.first_use(bucket)

    def compile(self, bucket: Bucket) -> None:
        """Makes the recipes of ``bucket`` at its padded shape; these compilations are no recompiles."""
        self.settle()
        before, start = self.enter("compiling"), time.perf_counter()
        try:
            self.program(bucket).compile()
            if bucket in self.planned:
                self.took[bucket] = time.perf_counter() - start
        finally:
            self.enter(before)
            self.expected()

    def expected(self) -> None:
        """Takes the compilations so far as wanted."""
        self._known = self.backend.compilations()
        self.changes += 1

    def settle(self) -> int:
        """Counts compilations that nobody asked for since the last call; returns them."""
        now = self.backend.compilations()
        found, self._known = now - self._known, now
        self.recompiles += found if self.counted else 0
        return found

    def _launch(self, program: Program) -> Any:
        def work() -> Any:
            return program.replay() if program.state is ProgramState.CAPTURED else program.run()

        return self._patiently(program.bucket, work)

    def _patiently(self, bucket: Bucket, work: Callable[[], T]) -> T:
        """``work``; where the device runs out of memory, again with one graph less, and at last without any.

        Ranks of a group cannot: one that runs out inside a launch leaves the others waiting in its collectives.
        """
        none_left = not self.counted or self.backend.comm.world > 1
        while True:
            try:
                return work()
            except Exception as error:
                if none_left or not ran_out(error):
                    raise
                log.warning("%s: %s; giving a graph up and trying again", bucket, line(error))
            none_left = self.relieve() is None

    def relieve(self) -> Bucket | None:
        """Gives up the graph that was needed least; its bucket stays compiled. None where there is no graph."""
        self.backend.synchronize()
        held = self.captured()
        if not held:
            return None
        victim = min(held, key=lambda b: (self.hits[b], -self._programs[b].bytes, b))
        self.released(victim, self._programs[victim].release())
        self.changes += 1
        return victim
