"""Decode workers: processes that turn a stranger's bytes into pixels, each job under limits of its own.

A hostile file can at worst end its worker. The parent keeps one thread per worker; it waits on a socket pair, so the
event loop never does, and pixels are received straight into the array that is handed on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from trencadis.core.cpus import available_cpus
from trencadis.core.errors import BadRequest, TooLarge, TrencadisError, Unavailable, from_status
from trencadis.multimodal.workers import pipe
from trencadis.multimodal.workers.process import WorkerDied, WorkerProcess

log = logging.getLogger("trencadis.multimodal")

UNDECODABLE = "The media could not be decoded."
TOO_LONG = "The media takes too long to decode."
NO_WORKER = "Media cannot be decoded at the moment."
MAX_WORKERS = 8
JOBS_PER_WORKER = 1000
"""Jobs after which a worker is replaced."""
MAX_PEAK_BYTES = 512 << 20
"""Peak memory of a worker, in bytes, above which it is replaced after its job."""
IDLE_SECONDS = 120.0
"""Seconds after which an idle worker ends; the first one stays."""
MEMORY_BUDGET = 2 << 30
"""Bytes that running jobs may have been granted in all; a larger job runs alone."""
GRACE_SECONDS = 0.1
"""Seconds that a job goes on after its caller left; most end in that time, and their worker is kept."""
POLL_SECONDS = 0.05
RETRY_SECONDS = 1.0
"""A worker that dies sooner than this many seconds into a job may not have died of it; the job is run once more."""


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do.

    Args:
        name: of ``multimodal/images/jobs.py``.
        options: JSON values.
        seconds: of CPU, and of wall time from the moment that a worker takes it.
        memory: bytes of address space beyond what an idle worker has.
        reply: most bytes of the answer's buffers.
    """

    name: str
    options: Mapping[str, Any]
    seconds: float = 20.0
    memory: int = 1 << 30
    reply: int = 1 << 30


@dataclass(slots=True)
class Answer:
    """What came back: JSON values, and uint8 arrays that are views of one received block."""

    values: dict[str, Any]
    buffers: list[npt.NDArray[np.uint8]]


@dataclass(slots=True, eq=False)
class PoolTicket:
    """A job on its way through the pool."""

    job: Job
    data: bytes | bytearray | memoryview
    future: Future[Answer] = field(default_factory=Future)
    deadline: float = float("inf")
    left: float = float("inf")
    """When its caller left, plus ``GRACE_SECONDS``."""

    def check(self) -> float:
        """Seconds to wait at most before looking again.

        Raises:
            _CallerLeft: the caller is gone.
            TooLarge: out of time.
        """
        now = time.monotonic()
        if now > self.left:
            raise _CallerLeft(NO_WORKER)
        if now > self.deadline:
            raise TooLarge(TOO_LONG)
        return min(POLL_SECONDS, self.deadline - now + 0.001)

    def settle(self, result: Answer | TrencadisError) -> None:
        """Wakes the caller, if it still waits."""
        try:
            if isinstance(result, Answer):
                self.future.set_result(result)
            else:
                self.future.set_exception(result)
        except InvalidStateError:
            pass


class _CallerLeft(TrencadisError):
    """The caller was cancelled."""


class WorkerPool:
    """At most ``size`` workers, started when there is work for them.

    Invariants: a ticket is settled exactly once; bytes granted to running jobs are at most ``budget``, or one job runs;
    a worker that died, was killed or kept no protocol is never given another job.

    Args:
        size: workers; None: one per available CPU, at most 8.
        jobs: name to ``module:function``, beside the table of ``multimodal/images/jobs.py``.
        recycle: jobs of one worker.
        idle: seconds after which all but one end.
        budget: bytes.
    """

    def __init__(
        self,
        size: int | None = None,
        *,
        jobs: Mapping[str, str] | None = None,
        recycle: int = JOBS_PER_WORKER,
        idle: float = IDLE_SECONDS,
        budget: int = MEMORY_BUDGET,
    ) -> None:
        self.size = size or min(MAX_WORKERS, available_cpus())
        self.recycle = recycle
        self.idle = idle
        self.budget = budget
        self.jobs = dict(jobs or {})
        self.started = 0
        self.deaths = 0
        """Workers that ended without an answer, or had to be killed over a deadline."""
        self.closed = False
        self._waiting: deque[PoolTicket] = deque()
        self._change = Condition()
        self._threads = 0
        self._idle_threads = 0
        self._granted = 0
        self._processes: set[WorkerProcess] = set()

    async def run(self, job: Job, data: bytes | bytearray | memoryview) -> Answer:
        """Runs ``job`` on ``data``. A cancelled caller's job is dropped, or killed ``GRACE_SECONDS`` seconds later.

        Raises:
            TrencadisError: the job's own; or 400: its worker died, 413: out of time or memory, 503: no worker starts.
        """
        ticket = self.submit(job, data)
        try:
            return await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            self.abandon(ticket)
            raise

    def run_now(self, job: Job, data: bytes | bytearray | memoryview) -> Answer:
        """``run`` for callers that may block."""
        return self.submit(job, data).future.result()

    def submit(self, job: Job, data: bytes | bytearray | memoryview) -> PoolTicket:
        """Queues a job; its ticket's ``future`` is settled by a worker's thread."""
        ticket = PoolTicket(job, data)
        with self._change:
            if self.closed:
                raise Unavailable(NO_WORKER)
            self._waiting.append(ticket)
            if self._idle_threads < len(self._waiting) and self._threads < self.size:
                self._start_thread()
            self._change.notify()
        return ticket

    def abandon(self, ticket: PoolTicket) -> None:
        """Nobody waits for ``ticket`` any more."""
        ticket.left = time.monotonic() + GRACE_SECONDS
        with self._change:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def pids(self) -> list[int]:
        """Of the workers that live."""
        with self._change:
            return [p.pid for p in self._processes if p.alive]

    def close(self) -> None:
        """Ends all workers; jobs that wait or run get a 503."""
        with self._change:
            self.closed = True
            waiting, processes = list(self._waiting), list(self._processes)
            self._waiting.clear()
            self._change.notify_all()
        for ticket in waiting:
            ticket.settle(Unavailable(NO_WORKER))
        for process in processes:
            process.kill()

    # --- a worker's thread ---

    def _start_thread(self) -> None:
        self._threads += 1
        self._idle_threads += 1
        Thread(target=self._serve_tickets, daemon=True, name=f"decode-{self._threads}").start()

    def _serve_tickets(self) -> None:
        process: WorkerProcess | None = None
        while (ticket := self._next_ticket()) is not None:
            try:
                process, result = self._run_ticket(ticket, process)
            except Exception:
                log.exception("a decode worker's thread failed")
                self._end_process(process)
                process, result = None, TrencadisError(NO_WORKER)
            with self._change:
                self._granted -= ticket.job.memory
                # Before the caller wakes: its next job must find this lane free.
                self._idle_threads += 1
                self._change.notify_all()
            ticket.settle(result)
            # Pixels may be large; an idle thread must not keep the last ones.
            del ticket, result
            process = self._recycled(process)
        self._end_process(process)

    def _next_ticket(self) -> PoolTicket | None:
        """The first ticket, once its memory can be granted; None: this thread is no lane any more."""
        end = time.monotonic() + self.idle
        with self._change:
            while not self.closed:
                if self._waiting and (not self._granted or self._granted + self._waiting[0].job.memory <= self.budget):
                    ticket = self._waiting.popleft()
                    self._granted += ticket.job.memory
                    self._idle_threads -= 1
                    return ticket
                left = end - time.monotonic()
                if left <= 0 and self._threads > 1 and not self._waiting:
                    break
                self._change.wait(left if left > 0 else self.idle)
            self._idle_threads -= 1
            self._threads -= 1
            return None

    def _run_ticket(
        self, ticket: PoolTicket, process: WorkerProcess | None
    ) -> tuple[WorkerProcess | None, Answer | TrencadisError]:
        """Runs a ticket; returns the worker, if it can be given another one, and the result."""
        process, result = self._attempt(ticket, process)
        if result is None:
            process, result = self._attempt(ticket, process)
        return process, result or BadRequest(UNDECODABLE)

    def _attempt(
        self, ticket: PoolTicket, process: WorkerProcess | None
    ) -> tuple[WorkerProcess | None, Answer | TrencadisError | None]:
        """The worker, if it can be given another job, and the result; None: it died, perhaps not of this job."""
        start = time.monotonic()
        job = ticket.job
        try:
            if process is None or not process.alive:
                self._end_process(process)
                process = self._spawn()
            process.wait_ready(ticket.check)
            start = time.monotonic()
            ticket.deadline = start + job.seconds
            asked = {"job": job.name, "options": dict(job.options), "memory": job.memory, "seconds": job.seconds}
            return process, _result(*process.exchange(asked, ticket.data, job.reply, ticket.check))
        except (WorkerDied, pipe.ProtocolError):
            self.deaths += 1
            if self._end_process(process, patience=0.5):
                return None, TooLarge(TOO_LONG)
            if self.closed:
                return None, Unavailable(NO_WORKER)
            early = time.monotonic() - start < RETRY_SECONDS
            return None, None if early else BadRequest(UNDECODABLE)
        except TrencadisError as error:
            self.deaths += not isinstance(error, _CallerLeft)
            self._end_process(process)
            return None, error
        except OSError:
            log.exception("no decode worker could be started")
            self._end_process(process)
            return None, Unavailable(NO_WORKER, retry_after=1)

    def _spawn(self) -> WorkerProcess:
        process = WorkerProcess(self.jobs)
        with self._change:
            self.started += 1
            self._processes.add(process)
        return process

    def _end_process(self, process: WorkerProcess | None, patience: float = 0.0) -> bool:
        """Ends a worker; whether it had died because its CPU time was spent."""
        if process is None:
            return False
        with self._change:
            self._processes.discard(process)
        return process.kill(patience)

    def _recycled(self, process: WorkerProcess | None) -> WorkerProcess | None:
        """The same worker, or a fresh one where it has done enough; that one starts while nobody waits for it."""
        if process is None or (process.jobs < self.recycle and process.peak <= MAX_PEAK_BYTES):
            return process
        self._end_process(process)
        try:
            return self._spawn()
        except OSError:
            return None


def _result(message: dict[str, Any], buffers: list[npt.NDArray[np.uint8]]) -> Answer | TrencadisError:
    """What a worker said. It may have been taken over by what it decoded: only statuses of ours pass."""
    values, status, text = message.get("values"), message.get("status"), message.get("message")
    if isinstance(values, dict):
        return Answer(values, buffers)
    if status in (400, 413, 415) and isinstance(text, str):
        return from_status(status, text)
    return BadRequest(UNDECODABLE)
