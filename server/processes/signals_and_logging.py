"""Signals and logging of the API process.

SIGINT and SIGTERM end a start-up; later the first drains and the second stops at once. Our loggers and uvicorn's have
one format.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from types import FrameType

from trencadis.core.engine_config import EngineConfig
from trencadis.core.process import log_setup
from trencadis.server.config.server_config import ServerConfig

BOTH = (signal.SIGINT, signal.SIGTERM)


class EarlyStop(BaseException):
    """Raised when a signal arrives during start-up."""


def raise_early_stop() -> None:
    """Makes a signal raise EarlyStop in the main thread."""
    for number in BOTH:
        signal.signal(number, _raise_early_stop)


def _raise_early_stop(number: int, frame: FrameType | None) -> None:
    raise EarlyStop


def handle_in_loop(loop: asyncio.AbstractEventLoop, first: Callable[[bool], None], second: Callable[[], None]) -> None:
    """Calls ``first`` at the first signal (with whether it is SIGTERM), ``second`` at further ones."""
    count = 0

    def on_signal(number: int) -> None:
        nonlocal count
        count += 1
        if count == 1:
            first(number == signal.SIGTERM)
        else:
            second()

    for number in BOTH:
        loop.add_signal_handler(number, on_signal, number)


def on_hangup(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]) -> None:
    """Calls ``calls`` at each SIGHUP, which requests that files are read again; without calls SIGHUP ends the
    process.
    """

    def again() -> None:
        for call in calls:
            call()

    if calls:
        loop.add_signal_handler(signal.SIGHUP, again)


def ignore_signals() -> None:
    """Ignores signals during the last steps of shutdown."""
    for number in BOTH:
        signal.signal(number, signal.SIG_IGN)


STARTED = "Application startup complete."


class _Quiet(logging.Filter):
    """Drops the access log lines of certain paths."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in self.paths)


class _DropStartupLine(logging.Filter):
    """Drops uvicorn's own start-up line: ``log_started`` logs it once the engine accepts requests, as scripts
    expect.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != STARTED or bool(getattr(record, "accepting", False))


class _NoQueries(logging.Filter):
    """Removes query strings from uvicorn's lines about scopes (at level trace), as some clients put keys there."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                {**one, "query_string": "<...>"} if isinstance(one, dict) and "query_string" in one else one
                for one in record.args
            )
        return True


def set_up_logging(engine: EngineConfig, server: ServerConfig) -> None:
    """Sets the form and the levels: ours to ``--log-level``, uvicorn's to ``--uvicorn-log-level``; then applies
    ``--log-config-file``.

    Raises:
        StartupError: that file is no ``dictConfig``.
    """
    log_setup.setup(engine.log_level, engine.log_format)
    named = server.uvicorn_log_level
    logging.getLogger("uvicorn").setLevel(5 if named == "trace" else named.upper())
    logging.getLogger("uvicorn.error").addFilter(_DropStartupLine())
    logging.getLogger("uvicorn.asgi").addFilter(_NoQueries())
    logging.getLogger("uvicorn.access").addFilter(_Quiet(server.disable_access_log_for_endpoints))
    log_setup.apply_config_file(engine.log_config_file)


def log_started(address: str) -> None:
    """Logs uvicorn's start-up lines; called once the server accepts requests."""
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.info(STARTED, extra={"accepting": True})
    uvicorn.info("Uvicorn running on %s (Press CTRL+C to quit)", address)
