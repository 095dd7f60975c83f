"""SIGINT and SIGTERM: before the event loop runs they end start-up; then the first drains, the second stops at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

BOTH = (signal.SIGINT, signal.SIGTERM)


class EarlyStop(BaseException):
    """A signal came while the server was starting."""


def early() -> None:
    """From now on a signal raises EarlyStop in the main thread."""
    for number in BOTH:
        signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise EarlyStop


def in_loop(loop: asyncio.AbstractEventLoop, first: Callable[[bool], None], second: Callable[[], None]) -> None:
    """``first`` at the first signal (whether it was SIGTERM, which orchestrators send), ``second`` at further ones."""
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


def ignore() -> None:
    """Nothing is left that a signal could do better."""
    for number in BOTH:
        signal.signal(number, signal.SIG_IGN)
