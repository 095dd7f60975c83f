"""``VLLM_TRACE_FUNCTION=1``: logs the function calls of this package to one file per process.

From Python 3.12 on it uses ``sys.monitoring``, which does not slow down other packages' code; on 3.11 a profile
function, which is called for theirs too.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TextIO

from trencadis.core import envs

log = logging.getLogger("trencadis.engine")
NAME = "VLLM_TRACE_FUNCTION"
ROOT = str(Path(__file__).resolve().parent.parent.parent) + os.sep
PACKAGES = tuple(ROOT + name + os.sep for name in ("core", "backends", "multimodal", "server", "trencadis"))


class FunctionTrace:
    """Writes one line for each call of and return from this package's functions.

    Args:
        out: receives lines with seconds, thread, ``call`` or ``return``, function, file and line.
        ours: prefixes of the files whose functions are traced.
    """

    def __init__(self, out: TextIO, ours: tuple[str, ...] = PACKAGES) -> None:
        self._out, self._ours = out, ours

    def is_traced(self, code: CodeType) -> bool:
        """Returns True if the calls of ``code`` are written; this file is excluded to avoid endless recursion."""
        return code.co_filename.startswith(self._ours) and code.co_filename != __file__

    def write(self, what: str, code: CodeType) -> None:
        """Writes one line; calls no function of this package, so that it does not trace itself."""
        where = f"{code.co_filename.removeprefix(ROOT)}:{code.co_firstlineno}"
        self._out.write(f"{time.monotonic():.6f} {threading.get_native_id()} {what} {code.co_qualname} {where}\n")

    def start(self) -> Callable[[], None]:
        """Starts tracing this thread and all threads started later; returns a function that stops it."""
        if sys.version_info >= (3, 12):
            return self._monitor()
        return self._profile()

    if sys.version_info >= (3, 12):

        def _monitor(self) -> Callable[[], None]:
            monitoring = sys.monitoring
            tool = monitoring.PROFILER_ID
            monitoring.use_tool_id(tool, NAME)
            events = monitoring.events

            def called(code: CodeType, offset: int) -> object:
                if not self.is_traced(code):
                    return monitoring.DISABLE
                self.write("call", code)
                return None

            def returned(code: CodeType, offset: int, value: object) -> object:
                if not self.is_traced(code):
                    return monitoring.DISABLE
                self.write("return", code)
                return None

            monitoring.register_callback(tool, events.PY_START, called)
            monitoring.register_callback(tool, events.PY_RETURN, returned)
            monitoring.set_events(tool, events.PY_START | events.PY_RETURN)

            def end() -> None:
                monitoring.set_events(tool, 0)
                monitoring.free_tool_id(tool)

            return end

    def _profile(self) -> Callable[[], None]:
        def profile(frame: FrameType, event: str, arg: object) -> None:
            if event in ("call", "return") and self.is_traced(frame.f_code):
                self.write(event, frame.f_code)

        threading.setprofile(profile)
        sys.setprofile(profile)

        def end() -> None:
            threading.setprofile(None)
            sys.setprofile(None)

        return end


def start_if_asked() -> None:
    """Starts tracing this process if the environment requests it."""
    if not envs.get_bool(NAME):
        return
    # A new file that only this user can read. Lines are written immediately, so that they survive a hang.
    handle, path = tempfile.mkstemp(prefix=f"trencadis-calls-{os.getpid()}-", suffix=".log")
    FunctionTrace(os.fdopen(handle, "w", buffering=1)).start()
    log.warning("%s: the calls of process %d go to %s, which slows it down", NAME, os.getpid(), path)
