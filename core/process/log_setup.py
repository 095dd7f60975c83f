"""One log format for all processes: plain lines, or one JSON object per line."""

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
