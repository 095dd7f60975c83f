"""A pool of decode workers: processes that turn clients' files into pixels, each job under its own limits.

At worst, a hostile file ends its worker. One thread per worker waits on its socket, so that the event loop never does,
and receives pixels directly into the array that the caller gets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Thread

import numpy as np
import numpy.typing as npt

from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.errors import BadRequest, TooLarge, TrencadisError, Unavailable, from_status
from trencadis.core.json_types import JsonMapping, JsonObject
from trencadis.multimodal.decode_workers import worker_messages
from trencadis.multimodal.decode_workers.worker_process import WorkerDied, WorkerProcess, WorkerStopped

log = logging.getLogger("trencadis.multimodal")

UNDECODABLE = "The media could not be decoded."
TOO_LONG = "The media takes too long to decode."
NO_WORKER = "Media cannot be decoded at the moment."
MAX_WORKERS = 8
JOBS_PER_WORKER = 1000
"""Jobs after which a worker is replaced."""
MAX_PEAK_BYTES = 512 << 20
"""Bytes of peak memory above which a worker is replaced after its job."""
IDLE_SECONDS = 120.0
"""Idle seconds after which a worker exits, except the last one."""
MEMORY_BUDGET = 2 << 30
"""Most bytes granted to all running jobs together; a larger job runs alone."""
GRACE_SECONDS = 0.1
"""Seconds that a job may continue after its caller was cancelled.

Most jobs end within them, and their worker is kept.
"""
POLL_SECONDS = 0.05
"""Seconds between a thread's checks whether its caller was cancelled."""
STARVED = 0.1
"""Share of a job's seconds; if its worker got less CPU time until the deadline, the job is not at fault."""
RETRY_SECONDS = 1.0
"""Seconds from a job's start; if its worker dies within them, the job may not be the cause and is retried once."""


@dataclass(frozen=True)
class Job:
    """A job for a worker, and its limits.

    Args:
        name: key in the table of ``multimodal/decode_workers/worker_main.py``.
        options: JSON values.
        seconds: limit of CPU time, and of wall time since a worker started it.
        memory: limit of address space, in bytes beyond an idle worker's.
        reply: limit of the answer's buffers, in bytes.
        retry: True to retry it once if its worker dies early, because the job may not be the cause.
    """

    name: str
    options: JsonMapping
    seconds: float = 20.0
    memory: int = 1 << 30
    reply: int = 1 << 30
    retry: bool = True


@dataclass(slots=True)
class JobResult:
    """A worker's answer: JSON values, and uint8 [bytes] arrays, which are views of one received block."""

    values: JsonObject
    buffers: list[npt.NDArray[np.uint8]]


@dataclass(slots=True, eq=False)
class PoolTicket:
    """A job in the pool, waiting or running."""

    job: Job
    data: bytes | bytearray | memoryview
    future: Future[JobResult] = field(default_factory=Future)
    deadline: float = float("inf")
    abandoned_at: float = float("inf")
    """Time at which to end it because its caller was cancelled."""

    def check_deadline(self) -> float:
        """Returns the seconds until the next check is due.

        Raises:
            _CallerLeft: the caller was cancelled.
            TooLarge: the deadline has passed.
        """
        now = time.monotonic()
        if now > self.abandoned_at:
            raise _CallerLeft(NO_WORKER)
        if now > self.deadline:
            raise TooLarge(TOO_LONG)
        return min(POLL_SECONDS, self.deadline - now + 0.001)

    def settle(self, result: JobResult | TrencadisError) -> None:
        """Delivers the result to the caller, if it is still waiting."""
        with suppress(InvalidStateError):
            if isinstance(result, JobResult):
                self.future.set_result(result)
            else:
                self.future.set_exception(result)


class _CallerLeft(TrencadisError):
    """The caller was cancelled."""


class WorkerPool:
    """Runs jobs on up to ``size`` workers, which are started on demand.

    Invariants: a ticket is settled exactly once; bytes granted to running jobs are at most ``budget``, or one job runs
    alone; a worker that died, was killed or broke the protocol never gets another job.

    Args:
        size: most workers; None: one per available CPU, at most 8.
        jobs: name -> ``module:function``, in addition to ``multimodal/decode_workers/worker_main.py``.
        recycle: jobs after which a worker is replaced.
        idle: idle seconds after which a worker exits, except the last one.
        budget: most bytes granted to all running jobs together.
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
        """Workers that died or were killed during a job, except because the caller was cancelled."""
        self.closed = False
        self._waiting: deque[PoolTicket] = deque()
        self._change = Condition()
        self._threads = 0
        self._idle_threads = 0
        self._granted = 0
        self._processes: set[WorkerProcess] = set()

    async def run(self, job: Job, data: bytes | bytearray | memoryview) -> JobResult:
        """Runs ``job`` on ``data``. If the caller is cancelled, the job is dropped, or killed after ``GRACE_SECONDS``.

        Raises:
            TrencadisError: the job's own error; or 400: its worker died, 413: out of time or memory, 503: no worker can
                be started, two of them were stopped, or the machine gave the job no CPU time.
        """
        ticket = self.submit(job, data)
        try:
            return await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            self.abandon(ticket)
            raise

    def submit(self, job: Job, data: bytes | bytearray | memoryview) -> PoolTicket:
        """Queues a job; a pool thread settles the ticket's ``future``."""
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
        """Drops a ticket whose caller was cancelled; if it is running, ends it after ``GRACE_SECONDS``."""
        ticket.abandoned_at = time.monotonic() + GRACE_SECONDS
        with self._change:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def pids(self) -> list[int]:
        """Returns the process ids of the live workers."""
        with self._change:
            return [p.pid for p in self._processes if p.alive]

    def close(self) -> None:
        """Kills all workers; waiting and running jobs fail with 503."""
        with self._change:
            self.closed = True
            waiting, processes = list(self._waiting), list(self._processes)
            self._waiting.clear()
            self._change.notify_all()
        for ticket in waiting:
            ticket.settle(Unavailable(NO_WORKER))
        for process in processes:
            process.kill()

    # --- Thread of a worker ---

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
                # Before the caller wakes up: its next job must find this thread idle.
                self._idle_threads += 1
                self._change.notify_all()
            ticket.settle(result)
            # Pixels may be large: an idle thread must not keep the last ones alive.
            del ticket, result
            process = self._recycle_if_due(process)
        self._end_process(process)

    def _next_ticket(self) -> PoolTicket | None:
        """Returns the first ticket, once its memory can be granted; None: this thread must exit."""
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
    ) -> tuple[WorkerProcess | None, JobResult | TrencadisError]:
        """Runs a ticket, twice if its worker died early; returns the worker, if still usable, and the result."""
        process, result = self._attempt(ticket, process)
        if result is None:
            ticket.deadline = float("inf")
            process, result = self._attempt(ticket, process, last=True)
        return process, result or BadRequest(UNDECODABLE)

    def _attempt(
        self, ticket: PoolTicket, process: WorkerProcess | None, last: bool = False
    ) -> tuple[WorkerProcess | None, JobResult | TrencadisError | None]:
        """Runs a ticket once; returns the worker, if still usable, and the result; None: it must be retried."""
        start, before = time.monotonic(), 0.0
        job = ticket.job

        def check() -> float:
            assert process is not None
            process.check_running()
            if time.monotonic() > ticket.deadline and process.cpu_seconds() - before < STARVED * job.seconds:
                raise Unavailable(NO_WORKER, retry_after=1)
            return ticket.check_deadline()

        try:
            if process is None or not process.alive:
                process = self._replace_worker(process)
            process.wait_ready(check)
            start, before = time.monotonic(), process.cpu_seconds()
            ticket.deadline = start + job.seconds
            request = {"job": job.name, "options": dict(job.options), "memory": job.memory, "seconds": job.seconds}
            return process, _parse_answer(*process.exchange(request, ticket.data, job.reply, check))
        except (WorkerDied, worker_messages.ProtocolError):
            return None, self._handle_death(process, job.retry and time.monotonic() - start < RETRY_SECONDS)
        except WorkerStopped:
            log.warning("a decode worker was stopped, and is replaced")
            self.deaths += 1
            self._end_process(process)
            return None, Unavailable(NO_WORKER, retry_after=1) if last else None
        except (TrencadisError, OSError) as error:
            return None, self._handle_failure(process, error)

    def _handle_death(self, process: WorkerProcess | None, early: bool) -> TrencadisError | None:
        """Returns the error of a job whose worker died, or None if it died so early that the job is retried."""
        self.deaths += 1
        if self._end_process(process, patience=0.5):
            return TooLarge(TOO_LONG)
        if self.closed:
            return Unavailable(NO_WORKER)
        if early:
            log.debug("retry: a job whose decode worker died before reading it runs on another")
        return None if early else BadRequest(UNDECODABLE)

    def _handle_failure(self, process: WorkerProcess | None, error: TrencadisError | OSError) -> TrencadisError:
        """Returns the error of a job that was ended, or for which there is no worker."""
        self._end_process(process)
        if isinstance(error, TrencadisError):
            self.deaths += not isinstance(error, _CallerLeft)
            return error
        log.error("no decode worker could be started", exc_info=error)
        return Unavailable(NO_WORKER, retry_after=1)

    def _spawn(self) -> WorkerProcess:
        process = WorkerProcess(self.jobs)
        with self._change:
            self.started += 1
            self._processes.add(process)
        log.debug("worker: decode worker %d starts", process.pid)
        return process

    def _end_process(self, process: WorkerProcess | None, patience: float = 0.0) -> bool:
        """Ends a worker; returns True if it had died of its CPU limit."""
        if process is None:
            return False
        with self._change:
            self._processes.discard(process)
        log.debug("worker: decode worker %d ends after %d jobs", process.pid, process.jobs)
        return process.kill(patience)

    def _recycle_if_due(self, process: WorkerProcess | None) -> WorkerProcess | None:
        """Returns the worker, or a new one if it has run enough jobs or grown too large."""
        if process is None or (process.jobs < self.recycle and process.peak <= MAX_PEAK_BYTES):
            return process
        return self._try_replace_worker(process)

    def _replace_worker(self, process: WorkerProcess | None) -> WorkerProcess:
        """Ends a worker and returns a new one."""
        self._end_process(process)
        return self._spawn()

    def _try_replace_worker(self, process: WorkerProcess) -> WorkerProcess | None:
        try:
            return self._replace_worker(process)
        except OSError:
            return None


def _parse_answer(message: JsonObject, buffers: list[npt.NDArray[np.uint8]]) -> JobResult | TrencadisError:
    """Converts a worker's message to a result or an error."""
    values = message.get("values")
    return JobResult(values, buffers) if isinstance(values, dict) else _reported_error(message)


def _reported_error(message: JsonObject) -> TrencadisError:
    """Returns the error that a worker reports.

    A hostile file may control the worker, so only known statuses are passed on.
    """
    status, text = message.get("status"), message.get("message")
    if status in (400, 413, 415) and isinstance(text, str):
        return from_status(status, text)
    return BadRequest(UNDECODABLE)
