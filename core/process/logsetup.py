"""One log format for all processes."""

from __future__ import annotations

import logging
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMAT = "%(levelname)s %(asctime)s [%(shortname)s] %(message)s"


class ShortNames(logging.Formatter):
    """Shortens ``trencadis.server.cli.run`` to ``server``, because the process matters more than the file."""

    def format(self, record: logging.LogRecord) -> str:
        parts = record.name.split(".")
        record.shortname = parts[1] if parts[0] == "trencadis" and len(parts) > 1 else parts[0]
        return super().format(record)


def setup(level: str) -> None:
    """Sends this process's logs to stderr: Trencadis's own from ``level`` on, others from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShortNames(FORMAT, "%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("trencadis").setLevel(level)
