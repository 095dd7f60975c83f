"""One log format for all processes: plain lines, or one JSON object per line."""

from __future__ import annotations

import datetime
import json
import logging
import logging.config
import sys
from pathlib import Path

from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonMapping, JsonObject
from trencadis.core.process.log_queue import LogQueue, flush_logs

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
        given = json.loads(Path(path).read_text(encoding="utf-8"))
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
