"""Jobs of decode workers for tests: they run in the worker, named by the pool's ``jobs``."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time

from trencadis.core.errors import TooLarge
from trencadis.multimodal.decode_workers import worker_main

NAMES = ("echo", "sleep", "spin", "die", "hog", "refuse", "oops", "flood", "look", "stop")
JOBS = {name: f"tests.fakes.worker_jobs:{name}" for name in NAMES}


def echo(data, options):
    half = len(data) // 2
    return {"options": options, "pid": os.getpid()}, [memoryview(data)[:half], memoryview(data)[half:]]


def sleep(data, options):
    time.sleep(options["seconds"])
    return {"pid": os.getpid()}, []


def spin(data, options):
    while True:
        pass


def die(data, options):
    if options.get("once") and not os.path.exists(options["once"]):
        return {}, []
    if options.get("segfault"):
        ctypes.string_at(8)
    os.kill(os.getpid(), getattr(signal, options.get("signal", "SIGKILL")))


def stop(data, options):
    os.kill(os.getpid(), signal.SIGSTOP)
    return {}, []


def hog(data, options):
    return {"size": len(bytearray(options["bytes"]))}, []


def refuse(data, options):
    raise TooLarge("Ours.")


def oops(data, options):
    raise ValueError("a secret at 0x7f00")


def flood(data, options):
    return {}, [memoryview(bytes(options["bytes"]))]


def look(data, options):
    """What a worker could see and do."""
    written = True
    try:
        with open(options["path"], "w") as file:
            file.write("x" * 100)
    except OSError:
        written = False
    return {
        "environ": dict(os.environ),
        "written": written,
        "modules": options["modules"] and _loaded(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "peak": worker_main.peak_memory(),
    }, []


def _loaded():
    import sys

    return sorted(m for m in sys.modules if "." not in m)
