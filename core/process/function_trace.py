"""``VLLM_TRACE_FUNCTION=1``: the calls of this package, in a file a process.

From Python 3.12 on by ``sys.monitoring``, which leaves other packages' code at full speed; on 3.11 by a profile
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
from typing import Any, TextIO

from trencadis.core import envs

log = logging.getLogger("trencadis.engine")
NAME = "VLLM_TRACE_FUNCTION"
ROOT = str(Path(__file__).resolve().parent.parent.parent) + os.sep
PACKAGES = tuple(ROOT + name + os.sep for name in ("core", "backends", "multimodal", "server", "trencadis"))


class FunctionTrace:
    """Writes one line for each call of, and each return from, this package's functions.

    Args:
        out: where lines go: seconds, thread, ``call`` or ``return``, function, file and line.
        ours: prefixes of files whose functions are written.
    """

    def __init__(self, out: TextIO, ours: tuple[str, ...] = PACKAGES) -> None:
        self._out, self._ours = out, ours

    def is_traced(self, code: CodeType) -> bool:
        """Whether the calls of ``code`` are written; this file's own would go on for ever."""
        return code.co_filename.startswith(self._ours) and code.co_filename != __file__

    def write(self, what: str, code: CodeType) -> None:
        """Writes one line; it calls nothing of ours, so it does not write about itself."""
        where = f"{code.co_filename.removeprefix(ROOT)}:{code.co_firstlineno}"
        self._out.write(f"{time.monotonic():.6f} {threading.get_native_id()} {what} {code.co_qualname} {where}\n")

    def start(self) -> Callable[[], None]:
        """Writes from now on, for all threads that begin later and for this one; returns what ends it."""
        if sys.version_info >= (3, 12):
            return self._monitor()
        return self._profile()

    if sys.version_info >= (3, 12):

        def _monitor(self) -> Callable[[], None]:
            monitoring = sys.monitoring
            tool = monitoring.PROFILER_ID
            monitoring.use_tool_id(tool, NAME)
            events = monitoring.events

            def called(code: CodeType, offset: int) -> Any:
                if not self.is_traced(code):
                    return monitoring.DISABLE
                self.write("call", code)
                return None

            def returned(code: CodeType, offset: int, value: object) -> Any:
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
    """Begins to write this process's calls, if the environment asks for it."""
    if not envs.get_bool(NAME):
        return
    # A file that nobody else can read or has put there. Each line is written at once, for the hang that follows it.
    handle, path = tempfile.mkstemp(prefix=f"trencadis-calls-{os.getpid()}-", suffix=".log")
    FunctionTrace(os.fdopen(handle, "w", buffering=1)).start()
    log.warning("%s: the calls of process %d go to %s, which slows it down", NAME, os.getpid(), path)
