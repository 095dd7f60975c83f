"""A decode worker: one job after the other over the socket it inherited, each under limits of its own.

Started by ``multimodal/workers/pool.py``. It has no network, no files and no secrets to give away: it reads a job,
answers, and ends when the socket closes.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trencadis.core.errors import TrencadisError
from trencadis.multimodal.workers import jobs, pipe

DAMAGED = "The media could not be decoded."
TOO_LARGE = "The media is too large to decode."
PAGE = resource.getpagesize()


def main() -> None:
    """``decode_worker FD [NAME=MODULE:FUNCTION ...]``."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    more = dict(entry.split("=", 1) for entry in sys.argv[2:])
    drop_privileges()
    # Imported before the first job, whose seconds are for decoding.
    jobs.load("image", more)
    sock.sendall(pipe.pack_message({"ready": os.getpid()}))
    try:
        while True:
            serve_one(sock, more)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    # Whatever a job left behind in threads or exit handlers is not waited for.
    os._exit(0)


def drop_privileges() -> None:
    """Gives up what decoding does not need: files to write, many descriptors, cores, Ctrl-C and standard error."""
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64)):
        lower_limit(limit, value, hard=True)
    # Libraries print warnings of their own about hostile files; a log is not theirs to fill.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def lower_limit(limit: int, value: int, hard: bool = False) -> None:
    """Sets the soft (and the hard) limit to ``value`` or to what is allowed."""
    _, top = resource.getrlimit(limit)
    value = value if top == resource.RLIM_INFINITY else min(value, top)
    resource.setrlimit(limit, (value, value if hard else top))


def serve_one(sock: socket.socket, more: Mapping[str, str]) -> None:
    """Reads one job and answers it.

    Raises:
        EOFError: the pool is gone.
    """
    text, body = pipe.HEAD.unpack(pipe.read_exactly(sock, pipe.HEAD.size))
    asked = pipe.unpack_message(bytes(pipe.read_exactly(sock, text)), body)
    data = pipe.read_exactly(sock, body)
    answer, buffers = run_job(asked, data, more)
    answer["peak"] = peak_memory()
    sock.sendall(pipe.pack_message(answer, buffers))
    for buffer in buffers:
        sock.sendall(buffer)


def peak_memory() -> int:
    """The most memory that this process ever held, bytes. ru_maxrss would tell the parent's, from before the exec."""
    with open("/proc/self/status", "rb") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM")), 0)


def run_job(
    asked: dict[str, Any], data: bytearray, more: Mapping[str, str]
) -> tuple[dict[str, Any], Sequence[memoryview]]:
    """The answer to a job: its values and buffers, or a status and a message of ours."""
    try:
        job = jobs.load(asked["job"], more)
        limit_resources(asked["memory"], asked["seconds"])
        values, buffers = job(data, asked["options"])
        return {"values": values}, list(buffers)
    except TrencadisError as error:
        return {"status": error.status, "message": error.message}, []
    except MemoryError:
        return {"status": 413, "message": TOO_LARGE}, []
    except Exception:
        # Decoders raise about ten types on hostile bytes, and their texts leak addresses.
        return {"status": 400, "message": DAMAGED}, []
    finally:
        lower_limit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1])


def limit_resources(memory: int, seconds: float) -> None:
    """Limits what follows to ``memory`` bytes of address space and ``seconds`` of CPU beyond what is used now."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * PAGE
    lower_limit(resource.RLIMIT_AS, used + memory)
    lower_limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 1)


if __name__ == "__main__":
    main()
