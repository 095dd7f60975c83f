"""Handlers of SIGINT and SIGTERM: they end a start-up; later the first drains and the second stops at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from types import FrameType

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
