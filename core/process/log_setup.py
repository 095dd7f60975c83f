"""One log format for all processes: plain lines, or one JSON object per line.

Lines are written from a thread, so that a reader of stderr that is stuck stops no request.
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.config
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.operator_files import read_regular_text

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


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
THEIRS, THEIRS_TO_OURS = "vllm", "trencadis"
"""Beginnings of names of loggers in vLLM and here."""
FORMAT = "%(levelname)s %(asctime)s [%(shortname)s] %(message)s"
JSON = "json"


def short_name(name: str) -> str:
    """Returns ``server`` for ``trencadis.server.cli.serve``, because the process matters more than the file."""
    parts = name.split(".")
    return parts[1] if parts[0] == "trencadis" and len(parts) > 1 else parts[0]


class ShortNames(logging.Formatter):
    """Formats records as plain lines with short logger names."""

    def format(self, record: logging.LogRecord) -> str:
        record.shortname = short_name(record.name)
        return super().format(record)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object per line.

    It has time, level, logger, process, message, the values of the record's ``fields()``, and an exception if there is
    one.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        made: JsonObject = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": short_name(record.name),
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", dict)(),
        }
        if record.exc_info:
            made["exception"] = self.formatException(record.exc_info)
        # json.dumps escapes non-ASCII, so that a surrogate sent by a client cannot break the line.
        return json.dumps(made, default=str)


def setup(level: str, form: str = "text") -> None:
    """Sends this process's logs to stderr: Trencadis's own from ``level`` on, others from WARNING on.

    Args:
        form: ``text`` or ``json``.
    """
    flush_logs()  # lines of a queue that is replaced here
    handler = LogQueue(sys.stderr)
    handler.setFormatter(JsonLines() if form == JSON else ShortNames(FORMAT, "%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("trencadis").setLevel(level)


def apply_config_file(path: str) -> None:
    """Applies a JSON file of a ``logging.config.dictConfig`` over what ``setup`` has set; "": there is none.

    What it says of vLLM's loggers holds for ours, unless it names ours too. Loggers that it does not name stay.

    Raises:
        StartupError: the file cannot be read or is no such configuration.
    """
    if not path:
        return
    rule = "give a JSON file of a logging.config.dictConfig (version 1)"
    try:
        if not Path(path).is_file():
            raise StartupError(f"--log-config-file {path}: no such file; {rule}")
        given = json.loads(read_regular_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"--log-config-file {path}: {_first_line(error)}; {rule}") from None
    if not isinstance(given, dict):
        raise StartupError(f"--log-config-file {path}: not a JSON object; {rule}")
    try:
        logging.config.dictConfig(_translate(given))
    except (ValueError, TypeError, AttributeError, ImportError, KeyError, OSError) as error:
        raise StartupError(f"--log-config-file {path}: {_first_line(error.__cause__ or error)}; {rule}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _translate(given: JsonMapping) -> JsonObject:
    """A configuration for vLLM's loggers as one for ours; formatters of its package become plain ones."""
    made = {"disable_existing_loggers": False, **given}
    loggers = made.get("loggers")
    if isinstance(loggers, dict):
        ours = {
            THEIRS_TO_OURS + name[len(THEIRS) :]: one
            for name, one in loggers.items()
            if name == THEIRS or name.startswith(THEIRS + ".")
        }
        made["loggers"] = {**ours, **loggers}
    formatters = made.get("formatters")
    if isinstance(formatters, dict):
        made["formatters"] = {name: _drop_their_class(one) for name, one in formatters.items()}
    return made


def _drop_their_class(formatter: Json) -> Json:
    if not isinstance(formatter, dict):
        return formatter
    theirs = (key for key in ("class", "()") if str(formatter.get(key, "")).startswith(THEIRS + "."))
    dropped = {*theirs}
    return {key: value for key, value in formatter.items() if key not in dropped}
