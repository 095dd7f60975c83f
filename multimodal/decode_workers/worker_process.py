"""The parent's handle of one decode worker: the process, its socket, and exchanges with deadlines."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from trencadis.core.json_types import JsonObject
from trencadis.core.process.child_process_environment_and_exit import python_path, read_stat
from trencadis.multimodal.decode_workers import worker_messages

START_SECONDS = 30.0
STOPPED_SECONDS = 3.0
"""Seconds for which a stopped worker may wait to be continued."""
LOOK_SECONDS = 0.5
"""Seconds between looks at a worker's state."""
SEND_BUFFER = 4 << 20
"""Bytes of the socket's send buffer, which the kernel may cap; the default costs a context switch per 200 kB."""
INHERITED_ENV = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "SYSTEMROOT",
)
"""Environment variables that a worker inherits; keys and tokens are not among them."""
SINGLE_THREAD_ENV = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
"""Environment variables set to 1: more threads and arenas would reserve address space."""

MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(48 << 20)}
"""malloc settings: by default the heap shrinks and grows with every image, which costs a third of decoding time."""

Check = Callable[[], float]
"""Returns the seconds until it must be called again; raises to stop the waiting."""


class WorkerDied(Exception):
    """The worker ended without an answer."""


class WorkerStopped(Exception):
    """The worker has been stopped (SIGSTOP, a debugger) for ``STOPPED_SECONDS``: it answers nothing."""


class StartFailed(OSError):
    """The worker did not start: the installation or the machine is at fault, not the file."""


class WorkerProcess:
    """A worker process, started by the constructor.

    Args:
        jobs: name -> ``module:function``, in addition to the worker's own table.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, jobs: Mapping[str, str]) -> None:
        self.jobs = 0
        self.peak = 0
        self.ready = False
        self._started = time.monotonic()
        self._look_at = self._stopped_at = 0.0
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        command = [sys.executable, "-P", "-m", "trencadis.multimodal.decode_workers.worker_main", str(theirs.fileno())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, *(f"{name}={where}" for name, where in jobs.items())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=worker_environment(os.environ),
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        self._sock = ours
        self._poll = select.poll()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process is still running."""
        return self._process.poll() is None

    def check_running(self) -> None:
        """Raises WorkerStopped if the process has been stopped for ``STOPPED_SECONDS``."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if read_stat(self.pid)[0] not in "Tt":
            self._stopped_at = 0.0
            return
        self._stopped_at = self._stopped_at or now
        if now - self._stopped_at >= STOPPED_SECONDS:
            raise WorkerStopped

    def cpu_seconds(self) -> float:
        """Returns the CPU time that the process has taken."""
        fields = read_stat(self.pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0

    def wait_ready(self, check: Check) -> None:
        """Waits until the worker is ready for jobs.

        Raises:
            StartFailed: the worker ended, or took longer than ``START_SECONDS``.
        """
        if not self.ready:
            self._await_ready(check)
            self.ready = True

    def _await_ready(self, check: Check) -> None:
        """Waits for the first message of a starting worker."""

        def patience() -> float:
            if time.monotonic() - self._started > START_SECONDS:
                raise StartFailed
            return check()

        try:
            self._receive_answer(patience, 0)
        except (WorkerDied, worker_messages.ProtocolError):
            raise StartFailed from None

    def exchange(
        self, message: JsonObject, data: bytes | bytearray | memoryview, most: int, check: Check
    ) -> tuple[JsonObject, list[npt.NDArray[np.uint8]]]:
        """Sends a job and returns its answer.

        Args:
            message: the JSON object that ``worker_main.serve_one_job`` reads.
            data: the bytes to decode.
            most: limit of the answer's buffers, in bytes.
            check: stops the exchange by raising.

        Returns:
            The answer's JSON object, and its buffers as uint8 [bytes].

        Raises:
            WorkerDied: the worker ended.
            ProtocolError: it violated the protocol.
        """
        self.jobs += 1
        view = memoryview(data).cast("B")
        self._send(memoryview(worker_messages.pack_message(message, [view])), check)
        self._send(view, check)
        answer, buffers = self._receive_answer(check, most)
        peak = answer.get("peak")
        self.peak = peak if isinstance(peak, int) else 1 << 62
        return answer, buffers

    def kill(self, patience: float = 0.0) -> bool:
        """Kills and reaps the process; returns True if it had died of its CPU limit.

        Args:
            patience: seconds in which it may still exit by itself.
        """
        self._sock.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return self._process.returncode == -signal.SIGXCPU

    def _receive_answer(self, check: Check, most: int) -> tuple[JsonObject, list[npt.NDArray[np.uint8]]]:
        head = self._receive(worker_messages.HEAD.size, check)
        text, body = worker_messages.read_lengths(head.tobytes(), most)
        message = worker_messages.unpack_message(self._receive(text, check).tobytes(), body)
        return message, worker_messages.split_buffers(self._receive(body, check), message["sizes"])

    def _send(self, view: memoryview, check: Check) -> None:
        while view:
            self._wait(select.POLLOUT, check)
            try:
                view = view[self._sock.send(view[: worker_messages.CHUNK]) :]
            except BlockingIOError:
                pass
            except OSError:
                raise WorkerDied from None

    def _receive(self, size: int, check: Check) -> npt.NDArray[np.uint8]:
        """Receives uint8 [size]; page faults of the new array happen in the kernel, outside the interpreter's lock."""
        out = np.empty(size, np.uint8)
        view, at = out.data, 0
        while at < size:
            self._wait(select.POLLIN, check)
            try:
                got = self._sock.recv_into(view[at : at + worker_messages.CHUNK])
            except BlockingIOError:
                continue
            except OSError:
                raise WorkerDied from None
            if not got:
                raise WorkerDied
            at += got
        return out

    def _wait(self, event: int, check: Check) -> None:
        try:
            self._poll.register(self._sock, event)
        except (OSError, ValueError):
            raise WorkerDied from None
        while True:
            seconds = check()
            if self._poll.poll(max(seconds, 0.0) * 1000):
                return


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a worker's environment: the parent's own ``trencadis`` first on the path, one thread, no secrets."""
    env = {name: environ[name] for name in INHERITED_ENV if name in environ}
    env["PYTHONPATH"] = python_path(env)
    return env | dict.fromkeys(SINGLE_THREAD_ENV, "1") | MALLOC_ENV
