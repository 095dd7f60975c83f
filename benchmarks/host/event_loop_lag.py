"""An app whose event loop says how late its timers come: ``--app benchmarks.host.event_loop_lag:probed``, then ``GET
/lag``.

What a request waits for while the loop serves others is what a timer waits for, so a timer that is set again and again
samples it. The first request for ``/lag`` begins a sample, every later one ends it and begins the next.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI

from trencadis.server.config.resolve_settings import Settings
from trencadis.server.processes.build_app import build_app

EVERY = 0.005
"""Seconds until the timer is due."""


class Probe:
    """A timer, and by how much it came late."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._due = 0.0
        self._runs = False

    def begin(self) -> list[float]:
        """Starts anew; returns the seconds of the sample before."""
        found, self.late = self.late, []
        if not self._runs:
            self._runs = True
            self._set()
        return found

    def _set(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + EVERY
        loop.call_at(self._due, self._came)

    def _came(self) -> None:
        self.late.append(time.monotonic() - self._due)
        self._set()


def probed(settings: Settings, engines: Any) -> FastAPI:
    """The app of ``serve``, with the probe."""
    app, probe = build_app(settings, engines), Probe()

    @app.get("/lag")
    async def lag() -> list[float]:
        return probe.begin()

    return app
