"""The decode worker's program: runs jobs one after another from the socket it inherits, each under its own limits.

``multimodal/decode_workers/worker_process.py`` starts it. It holds no secrets and cannot write files; it reads a job,
answers, and exits when the socket closes.

The table of jobs that decode workers run.

A job is a function (data, options) -> (values, buffers): ``data`` is the file's bytes, ``options`` and ``values`` are
JSON objects, ``buffers`` raw bytes. It raises TrencadisError (400, 413 or 415) if the media is at fault, and may use as
much memory and time as the caller granted. To add one: write the function in a module that imports neither torch nor
the server, name it in ``JOBS``, and call ``WorkerPool.run(Job(name, options, ...), data)``.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from trencadis.core.errors import TrencadisError
from trencadis.core.host_memory import volunteer_for_oom_kill
from trencadis.core.json_types import JsonObject
from trencadis.multimodal.decode_workers import worker_messages

Values = JsonObject
JobFunction = Callable[[bytearray, Values], tuple[Values, Sequence[memoryview]]]

JOBS = {
    "image": "trencadis.multimodal.images.pil_decode:prepare_image",
    "video": "trencadis.multimodal.videos.video_job:prepare_video",
}
"""Name -> ``module:function``; the worker imports the module when it first runs the job."""


def load_job(name: str, more: Mapping[str, str]) -> JobFunction:
    """Imports the function of job ``name``, from the table or from ``more``.

    Raises:
        KeyError: there is no such job.
    """
    module, _, function = {**JOBS, **more}[name].partition(":")
    found: JobFunction = getattr(import_module(module), function)
    return found


DAMAGED = "The media could not be decoded."
TOO_LARGE = "The media is too large to decode."
PAGE = resource.getpagesize()


def main() -> None:
    """Runs ``python -m trencadis.multimodal.decode_workers.worker_main FD [NAME=MODULE:FUNCTION ...]``."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    more = dict(entry.split("=", 1) for entry in sys.argv[2:])
    drop_privileges()
    # Import the decoders now, so that the first job's time is spent on decoding.
    load_job("image", more)
    sock.sendall(worker_messages.pack_message({"ready": os.getpid()}))
    try:
        while True:
            serve_one_job(sock, more)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    # Exits without waiting for threads or exit handlers that a job left behind.
    os._exit(0)


def drop_privileges() -> None:
    """Drops abilities that decoding does not need: writing files, many descriptors, core dumps, Ctrl-C and standard
    error.
    """
    sys.dont_write_bytecode = True
    volunteer_for_oom_kill(1000)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64)):
        lower_limit(limit, value, hard=True)
    # Hostile files make libraries print warnings, which must not fill the log.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def lower_limit(limit: int, value: int, hard: bool = False) -> None:
    """Sets the soft limit, and with ``hard`` the hard one, to ``value`` or to the maximum that is allowed."""
    _, top = resource.getrlimit(limit)
    value = value if top == resource.RLIM_INFINITY else min(value, top)
    resource.setrlimit(limit, (value, value if hard else top))


def serve_one_job(sock: socket.socket, more: Mapping[str, str]) -> None:
    """Reads one job and answers it.

    Raises:
        EOFError: the pool closed the socket.
    """
    text, body = worker_messages.HEAD.unpack(worker_messages.read_exactly(sock, worker_messages.HEAD.size))
    request = worker_messages.unpack_message(bytes(worker_messages.read_exactly(sock, text)), body)
    data = worker_messages.read_exactly(sock, body)
    answer, buffers = run_job(request, data, more)
    answer["peak"] = peak_memory()
    sock.sendall(worker_messages.pack_message(answer, buffers))
    for buffer in buffers:
        sock.sendall(buffer)


def peak_memory() -> int:
    """Returns the peak memory of this process in bytes. ru_maxrss would include the parent's, from before the exec."""
    with open("/proc/self/status", "rb") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM")), 0)


def run_job(request: JsonObject, data: bytearray, more: Mapping[str, str]) -> tuple[JsonObject, Sequence[memoryview]]:
    """Runs a job; returns its values and buffers, or a status and a message that quotes no library."""
    try:
        job = load_job(request["job"], more)
        limit_resources(request["memory"], request["seconds"])
        values, buffers = job(data, request["options"])
        return {"values": values}, list(buffers)
    except Exception as error:
        return describe_error(error), []
    finally:
        lower_limit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1])


def describe_error(error: Exception) -> JsonObject:
    """Returns status and message of a failed job, without quoting any decoder."""
    if isinstance(error, TrencadisError):
        return {"status": error.status, "message": error.message}
    if isinstance(error, MemoryError):
        return {"status": 413, "message": TOO_LARGE}
    # Decoders raise many exception types on hostile bytes, and their messages leak addresses.
    return {"status": 400, "message": DAMAGED}


def limit_resources(memory: int, seconds: float) -> None:
    """Limits this process to ``memory`` bytes of address space and ``seconds`` of CPU beyond its current use."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * PAGE
    lower_limit(resource.RLIMIT_AS, used + memory)
    lower_limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 1)


if __name__ == "__main__":
    main()
