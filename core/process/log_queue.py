"""Writes log lines from a thread, so that a reader of stderr that is stuck stops no request."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

MOST_WAITING = 4 << 20
"""Characters of lines that wait to be written; further lines are dropped and counted."""

WRITE = 64 << 10
"""Characters of one write, which is at least one line."""

FLUSH = 1.0
"""Seconds for which the end of a process waits for its last lines."""


class LogQueue(logging.Handler):
    """Writes records to ``stream`` in a thread of its own.

    The stream is a pipe as a rule: once its reader stops (a stuck collector, ``| less``), a write never returns. Then
    lines wait, up to ``most`` characters; what comes after that is dropped, and the next line that can be written says
    how many there were.

    Attributes:
        dropped: lines that were not written, since the process began.
    """

    def __init__(self, stream: TextIO, most: int = MOST_WAITING) -> None:
        super().__init__()
        self.dropped = 0
        self._stream, self._most = stream, most
        self._lines: deque[str] = deque()
        self._size = 0  # of the lines that wait, and of those that are being written
        self._missed = 0  # lines dropped since a line was written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queues one record; never waits for the stream."""
        try:
            line = f"{self.format(record)}\n"
        except Exception:  # arguments that do not fit the message: logging's own way would write to stderr from here
            line = f"ERROR a line of log could not be formatted: {record.pathname}:{record.lineno}\n"
        with self._changed:
            if self._size and self._size + len(line) > self._most:
                self.dropped += 1
                self._missed += 1
                return
            self._lines.append(line)
            self._size += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float = FLUSH) -> None:
        """Waits until all lines are written, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, seconds)

    def _run(self) -> None:
        while True:
            text, missed = self._take()
            failed = 0
            try:
                self._write(text if not missed else f"{text}{self._count_dropped(missed)}\n")
            except (OSError, ValueError):  # the reader is gone, or the stream is closed
                failed = text.count("\n")
            with self._changed:
                self.dropped += failed
                self._size -= len(text)
                self._changed.notify_all()

    def _take(self) -> tuple[str, int]:
        """(lines to be written, lines that were dropped before now); waits for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines)
            taken, size = [self._lines.popleft()], 0
            size = len(taken[0])
            while self._lines and size + len(self._lines[0]) <= WRITE:
                taken.append(self._lines.popleft())
                size += len(taken[-1])
            missed, self._missed = self._missed, 0
            return "".join(taken), missed

    def _count_dropped(self, count: int) -> str:
        text = f"{count} lines of log were dropped, because nothing read stderr"
        record = logging.LogRecord("log", logging.WARNING, __file__, 0, text, None, None)
        return self.format(record)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def find_log_queue() -> LogQueue | None:
    """The handler of this process's logs; None before they are set up."""
    return next((h for h in logging.getLogger().handlers if isinstance(h, LogQueue)), None)


def flush_logs(seconds: float = FLUSH) -> None:
    """Waits for the last lines, where a process ends without Python's tear-down."""
    found = find_log_queue()
    if found is not None:
        with suppress(RuntimeError):  # the thread that ends the process may hold the lock: a signal came
            found.flush(seconds)
