"""One log format for all processes: lines for people, or a JSON object a line."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from trencadis.core.process.log_queue import LogQueue, flush_logs

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMAT = "%(levelname)s %(asctime)s [%(shortname)s] %(message)s"
JSON = "json"


def short_name(name: str) -> str:
    """``server`` for ``trencadis.server.cli.serve``, because the process matters more than the file."""
    parts = name.split(".")
    return parts[1] if parts[0] == "trencadis" and len(parts) > 1 else parts[0]


class ShortNames(logging.Formatter):
    """A line for people."""

    def format(self, record: logging.LogRecord) -> str:
        record.shortname = short_name(record.name)
        return super().format(record)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, what the record's ``fields()`` gives, an exception."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        made: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": short_name(record.name),
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", dict)(),
        }
        if record.exc_info:
            made["exception"] = self.formatException(record.exc_info)
        # Escaped, so that a surrogate that a client sent cannot break the line.
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
