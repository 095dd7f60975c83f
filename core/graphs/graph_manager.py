"""Keeps the programs of all buckets (PLANNED, COMPILED or CAPTURED), runs them and counts launches.

On a device without graphs every size may be its own bucket; only the most recently used programs are then kept.

The callbacks of a GraphManager: reports of events, and the query why a bucket has no graph.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from trencadis.core.bucket_lookup import Plan
from trencadis.core.buckets import DRAFT, Bucket, Stage, is_drafting, padded_tokens
from trencadis.core.device.backend import Backend, Body, Inputs, Program, ProgramState
from trencadis.core.errors import format_error, is_out_of_memory
from trencadis.core.graph_and_bucket_learning_report import SKIP, UNPLANNED
from trencadis.core.shapes.measured_launch_times import LaunchTime
from trencadis.core.step_output import StepStats


class GraphAccounts(Protocol):
    """Decides which buckets have a graph and accounts for their bytes; implemented by ``GraphCaptures``."""

    def capture_at_first_use(self, bucket: Bucket) -> None:
        """Called when a launch has made ``bucket`` compile for the first time."""
        ...

    def refund_released(self, bucket: Bucket, returned: int) -> None:
        """Called when the graph of ``bucket`` was released to free memory; ``returned`` bytes were recovered."""
        ...

    def missing_reason(self, bucket: Bucket) -> str:
        """Returns why a compiled bucket has no graph."""
        ...


class GraphObserver:
    """Observes one GraphManager, which receives it at construction.

    The accounts are attached once, later: their budget comes from a profile that runs on the same manager.

    Args:
        enter: sets the phase that health checks report; returns the previous one.
        lazy: True if warm-up is skipped, so that a graph is captured at the first use of its bucket.
    """

    def __init__(self, enter: Callable[[str], str] = lambda phase: phase, lazy: bool = False) -> None:
        self.enter, self._lazy = enter, lazy
        self._accounts: GraphAccounts | None = None

    def attach(self, accounts: GraphAccounts) -> None:
        """Sets the accounts of the manager's graphs; may be called only once."""
        assert self._accounts is None, "a manager's graphs have one set of accounts"
        self._accounts = accounts

    def note_first_use(self, bucket: Bucket) -> None:
        """Reports that a planned bucket was compiled for a launch; captures its graph if ``lazy``."""
        if self._lazy and self._accounts is not None:
            self._accounts.capture_at_first_use(bucket)

    def note_released(self, bucket: Bucket, returned: int) -> None:
        """Reports that a graph was released to free memory."""
        if self._accounts is not None:
            self._accounts.refund_released(bucket, returned)

    def missing_reason(self, bucket: Bucket) -> str:
        """Returns why a compiled bucket has no graph; "" while no accounts are attached."""
        return "" if self._accounts is None else self._accounts.missing_reason(bucket)


class Stopwatch(Protocol):
    """Measures the seconds from its creation to ``stop`` in the order of a device's launches; waits for nothing."""

    def stop(self) -> None:
        """Marks the end, after everything that has been launched so far."""
        ...

    def read(self) -> float | None:
        """Returns the seconds; None: the device has not come to the end yet."""
        ...


class TimedEvent(Protocol):
    """An event of a device's runtime that knows its time."""

    def record(self, *stream: object) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: TimedEvent) -> float: ...


class EventStopwatch:
    """The stopwatch of a device with events.

    Args:
        event: makes an event; its ``elapsed_time`` is in milliseconds.
        stream: the stream of the launches; none: the current one.
    """

    def __init__(self, event: Callable[[], TimedEvent], *stream: object) -> None:
        self._begun, self._ended, self._stream = event(), event(), stream
        self._begun.record(*stream)

    def stop(self) -> None:
        self._ended.record(*self._stream)

    def read(self) -> float | None:
        return self._begun.elapsed_time(self._ended) / 1000 if self._ended.query() else None


class WallStopwatch:
    """The stopwatch of a device whose launches have ended when they return."""

    def __init__(self) -> None:
        self._begun = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def read(self) -> float | None:
        return self._ended - self._begun


TIMED = 61
"""One of so many launches is measured: a prime, so that the stages of a step take turns."""

OPEN_WATCHES = 256


class LaunchTimer:
    """Measures the seconds on the device of one launch in ``every``. The rank's thread marks, another one may take.

    A device that refuses is not asked again: serving goes on without measurements.
    """

    def __init__(self, start: Callable[[], Stopwatch], every: int = TIMED) -> None:
        self._start, self.every, self._left = start, every, every
        self._open: deque[tuple[Bucket, Stopwatch]] = deque(maxlen=OPEN_WATCHES)

    @classmethod
    def of(cls, backend: Backend) -> LaunchTimer | None:
        """Returns the timer of a backend; None if its launches cannot be measured."""
        start: Callable[[], Stopwatch] | None = getattr(backend, "start_stopwatch", None)
        return None if start is None else cls(start)

    def begin(self) -> Stopwatch | None:
        """Starts a stopwatch before a launch that is to be measured; None: it is not."""
        self._left -= 1
        if self._left > 0:
            return None
        self._left = self.every
        try:
            return self._start()
        except RuntimeError as error:
            self._give_up(error)
        return None

    def end(self, bucket: Bucket, begun: Stopwatch) -> None:
        """Notes the end of the launch before which ``begin`` was called."""
        try:
            begun.stop()
        except RuntimeError as error:
            self._give_up(error)
        else:
            self._open.append((bucket, begun))

    def take(self) -> list[LaunchTime]:
        """Returns the launches that have ended since the last call."""
        found: list[LaunchTime] = []
        while self._open:
            bucket, watch = self._open[0]
            try:
                seconds = watch.read()
            except RuntimeError as error:
                self._give_up(error)
                break
            if seconds is None:
                break
            self._open.popleft()
            found.append(LaunchTime(bucket, seconds))
        return found

    def _give_up(self, error: Exception) -> None:
        log.warning("launches are not measured any more: %s", format_error(error))
        self._left = self.every = sys.maxsize
        self._open.clear()


log = logging.getLogger("trencadis.engine")

T = TypeVar("T")

KEPT = 8
"""Number of programs outside the plan that are kept (least recently used out first). Each holds its last inputs."""

BODIES = {Stage.VISION: "vision", Stage.RESET: "reset", Stage.POOL: "pool"}


def body_of(bucket: Bucket) -> str:
    """Returns the key in ``bodies`` of the body that a bucket runs."""
    text = f"text-{DRAFT}" if is_drafting(bucket) else "text"
    return bucket.variant if bucket.stage is Stage.SAMPLE else BODIES.get(bucket.stage, text)


class GraphManager:
    """One Program per bucket of one backend; buckets of a draft model have a backend of their own, ``drafting``, on
    the same device.
    """

    def __init__(
        self,
        backend: Backend,
        bodies: Mapping[str, Body],
        plan: Plan,
        observer: GraphObserver | None = None,
        drafting: Backend | None = None,
    ) -> None:
        self.backend, self.plan = backend, plan
        self._drafting = drafting or backend
        self.observer = observer or GraphObserver()
        self.counted = backend.policy.captures
        self.planned = frozenset(plan.buckets)
        self.hits: Counter[Bucket] = Counter()
        self.timer: LaunchTimer | None = None
        """Measures some launches; None: none, because shapes are not learned here."""
        self.took: dict[Bucket, float] = {}
        """Compile time of each bucket in seconds."""
        self.lazy_compiles = 0
        self.recompiles = 0
        self.changes = 0
        """Grows whenever a program's state changes, so that readers can detect changes."""
        self._unready = SKIP
        self._bodies = bodies
        self._programs: dict[Bucket, Program] = {}
        self._unplanned: OrderedDict[Bucket, Program] = OrderedDict()
        self._known = backend.compilations()

    @property
    def unready(self) -> str:
        """Why a launch may need a bucket that is not compiled (``core/graph_and_bucket_learning_report.py``)."""
        return self._unready

    def now_unready_for(self, why: str) -> None:
        """Sets the reason why planned buckets may not be compiled from now on."""
        self._unready = why

    def set_plan(self, plan: Plan) -> None:
        """Sets the plan of the launches from now on; programs that only an earlier plan has stay until ``forget``."""
        self.plan, self.planned = plan, frozenset(plan.buckets)
        self.changes += 1

    def expect(self, bucket: Bucket) -> None:
        """Keeps the program of ``bucket`` like those of the plan, before a plan that has it is set."""
        self.planned |= {bucket}
        unplanned = self._unplanned.pop(bucket, None)
        if unplanned is not None:
            unplanned.release()

    def forget(self, bucket: Bucket) -> int:
        """Drops the program of a bucket and returns the bytes of its graph; its inputs are freed with the last
        reference to it.
        """
        program = self._programs.pop(bucket, None)
        self.changes += 1
        return 0 if program is None else program.release()

    def program(self, bucket: Bucket) -> Program:
        """Returns the program of ``bucket``, created on first use.

        Of those outside the plan, the least recently used one above ``KEPT`` is released.
        """
        if bucket in self.planned:
            program = self._programs.get(bucket)
            if program is None:
                program = self._programs[bucket] = self.make(bucket)
            return program
        program = self._unplanned.get(bucket)
        if program is None:
            program = self._unplanned[bucket] = self.make(bucket)
            if len(self._unplanned) > KEPT:
                self._unplanned.popitem(last=False)[1].release()
        else:
            self._unplanned.move_to_end(bucket)
        return program

    def make(self, bucket: Bucket) -> Program:
        """Creates a program for ``bucket`` that the manager does not keep."""
        backend = self._drafting if is_drafting(bucket) else self.backend
        return backend.program(bucket, self._bodies[body_of(bucket)])

    def state(self, bucket: Bucket) -> ProgramState:
        """The state of a planned bucket's program."""
        program = self._programs.get(bucket)
        return ProgramState.PLANNED if program is None else program.state

    def list_captured(self) -> list[Bucket]:
        """Returns the planned buckets that have a graph."""
        return [b for b, p in list(self._programs.items()) if p.state is ProgramState.CAPTURED]

    def run(self, bucket: Bucket, inputs: Inputs, real: int) -> tuple[Any, StepStats]:
        """Runs one launch of ``real`` tokens, slots or rows: the graph if there is one, else the compiled body.

        Returns the program's outputs and the statistics of the launch.
        """
        start = time.perf_counter()
        program = self.program(bucket)
        first = self.counted and program.state is ProgramState.PLANNED
        if first:
            self._prepare(bucket)
        self.backend.fill(program, inputs)
        begun = None if self.timer is None or first else self.timer.begin()
        out = self._launch(program) if self.counted else program.run()
        if begun is not None and self.timer is not None:
            self.timer.end(bucket, begun)
        planned = not self.planned or bucket in self.planned
        miss = self._miss(bucket, program, first) if self.counted else ""
        seconds = time.perf_counter() - start
        return out, StepStats(bucket, real, padded_tokens(bucket), program.state.name, seconds, planned, miss)

    def _miss(self, bucket: Bucket, program: Program, first: bool) -> str:
        """Counts a launch and returns why it had no graph, "" if it had one.

        A graph captured for this very launch counts as missing.
        """
        self.hits[bucket] += 1
        if bucket not in self.planned:
            return UNPLANNED
        if first:
            return self._unready
        return "" if program.state is ProgramState.CAPTURED else self.observer.missing_reason(bucket) or self._unready

    def _prepare(self, bucket: Bucket) -> None:
        """Compiles a bucket that a launch needs immediately."""
        self.lazy_compiles += 1
        if bucket not in self.planned:
            log.warning("%s is outside the plan and is compiled now", bucket)
        self._with_relief(bucket, lambda: self.compile(bucket))
        if bucket in self.planned:
            self.observer.note_first_use(bucket)

    def compile(self, bucket: Bucket) -> None:
        """Compiles ``bucket`` at its padded shape; these compilations do not count as recompiles."""
        self.count_recompiles()
        before, start = self.observer.enter("compiling"), time.perf_counter()
        try:
            self.program(bucket).compile()
            if bucket in self.planned:
                self.took[bucket] = time.perf_counter() - start
        finally:
            self.observer.enter(before)
            self.accept_compilations()

    def accept_compilations(self) -> None:
        """Marks all compilations so far as intended."""
        self._known = self.backend.compilations()
        self.changes += 1

    def count_recompiles(self) -> int:
        """Counts unintended compilations since the last call as recompiles; returns their number."""
        now = self.backend.compilations()
        found, self._known = now - self._known, now
        self.recompiles += found if self.counted else 0
        return found

    def _launch(self, program: Program) -> Any:
        def work() -> Any:  # check the state at each try, since the released graph may be this one
            return program.replay() if program.state is ProgramState.CAPTURED else program.run()

        return self._with_relief(program.bucket, work)

    def _with_relief(self, bucket: Bucket, work: Callable[[], T]) -> T:
        """Runs ``work``; as long as the device runs out of memory and has graphs, releases a graph and retries.

        With several ranks there is no retry: a rank that fails inside a launch leaves the others waiting in a
        collective.
        """
        none_left = not self.counted or self.backend.comm.world > 1
        while True:
            try:
                return work()
            except Exception as error:
                if none_left or not is_out_of_memory(error):
                    raise
                log.warning("%s: %s; giving a graph up and trying again", bucket, format_error(error))
            none_left = self.release_least_used() is None

    def release_least_used(self) -> Bucket | None:
        """Releases the graph with the fewest launches; its bucket stays compiled. Returns None if there is no graph."""
        self.backend.synchronize()
        held = self.list_captured()
        if not held:
            return None
        victim = min(held, key=lambda b: (self.hits[b], -self._programs[b].bytes, b))
        self.observer.note_released(victim, self._programs[victim].release())
        self.changes += 1
        return victim
