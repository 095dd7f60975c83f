"""Reports the server's state to systemd (sd_notify(3)): starting, ready, stopping, alive; does nothing without
NOTIFY_SOCKET.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

STARTING_EVERY = 10.0
EXTENSION = 60.0
"""Seconds that each message during start-up requests: loading and warm-up may take longer than any fixed limit."""


class Notifier:
    """The notification socket of one systemd unit.

    Args:
        environ: has NOTIFY_SOCKET, and WATCHDOG_USEC if systemd restarts a server that sends nothing.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        usec = environ.get("WATCHDOG_USEC", "")
        mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog = int(usec) / 1e6 if usec.isdecimal() and mine else 0.0
        self.ready = False

    def send(self, *lines: str) -> None:
        """Sends one sd_notify message; dropped if the socket is full, so that the event loop does not block."""
        if self._address:
            kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)

    def notify_ready(self) -> None:
        """Reports that the server accepts requests."""
        self.ready = True
        self.send("READY=1", "STATUS=serving")

    def notify_stopping(self) -> None:
        """Reports that the server drains."""
        self.send("STOPPING=1", "STATUS=finishing requests")

    async def run(self, alive: Callable[[], bool], phase: Callable[[], str]) -> None:
        """Requests more time while the server starts, then reports that it is alive, at twice the watchdog's rate. This
        runs in the event loop that serves: if it hangs, systemd gets no messages.
        """
        if not self._address:
            return
        while not self.ready:
            self.send(f"EXTEND_TIMEOUT_USEC={EXTENSION * 1e6:.0f}", f"STATUS={phase()}", "WATCHDOG=1")
            await asyncio.sleep(min(STARTING_EVERY, self.watchdog / 2 or STARTING_EVERY))
        while self.watchdog:
            if alive():
                self.send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / 2)
