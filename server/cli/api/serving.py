"""What runs in the event loop of ``serve``: the supervisor, the reactions to signals, and a web server."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trencadis.core.process import heap
from trencadis.server.cli import logs, signals
from trencadis.server.cli.notify import Notifier
from trencadis.server.config.settings import Settings
from trencadis.server.http import listen

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.fleet.fleet import Fleet
    from trencadis.server.http.tls import Certificates
    from trencadis.server.routes.state import AppState
    from trencadis.server.tenants.turns import Turns

log = logging.getLogger("trencadis.server")

FLUSH_SECONDS = 5
"""Seconds in which the last answers are written once the engine is done."""
CUT_SECONDS = 1
"""Seconds of them where requests are cut."""
TRACES_SECONDS = 3.0
"""Seconds in which the last traces may reach their collector."""


class Serving:
    """A server from its first request to its end; sub-classes answer requests.

    Args:
        address: what its log line shows.
    """

    def __init__(self, settings: Settings, supervisor: Supervisor | Fleet, address: str) -> None:
        self.settings = settings
        self.supervisor = supervisor
        self.address = address
        self.unit = Notifier()
        self.code = 0
        self.last_words = ""
        self.said = False
        self.draining: asyncio.Task[None] | None = None
        supervisor.on_fatal = self.fatal
        supervisor.on_info.append(lambda info: self.started())

    async def serve(self) -> None:
        """Answers requests until ``leave``."""
        raise NotImplementedError

    def leave(self, seconds: int = FLUSH_SECONDS) -> None:
        """Ends ``serve``, which has ``seconds`` for the last answers."""
        raise NotImplementedError

    def again(self) -> Sequence[Callable[[], None]]:
        """What is read again at SIGHUP."""
        return ()

    def opened(self) -> int:
        """Requests that are open in this process."""
        return self.supervisor.open_requests

    @property
    def takes_turns(self) -> bool:
        """Whether requests wait for their tenant's turn before they are read."""
        return False

    def waiting(self) -> int:
        """Those that do so now."""
        return 0

    async def close_turns(self, seconds: float) -> int:
        """Takes no more of them; returns how many had no turn within ``seconds``, and end with an error."""
        return 0

    async def closed(self) -> None:
        """Called last."""

    def to_the_end(self) -> int:
        """Serves; prints the last words, and returns the exit code."""
        code = asyncio.run(self.run())
        if self.last_words:
            print(f"trencadis: {self.last_words}", file=sys.stderr, flush=True)
        return code

    async def run(self) -> int:
        """Serves until a signal, or an engine that cannot start."""
        helpers = self._begin()
        try:
            await self.serve()
        finally:
            await self._end(helpers)
        return self.code

    def _begin(self) -> list[asyncio.Task[None]]:
        """Reacts to signals and supervises the engine from now on; the tasks beside the server."""
        signals.in_loop(asyncio.get_running_loop(), self.drain, self.stop_now)
        signals.on_hangup(asyncio.get_running_loop(), self.again())
        self.supervisor.start()
        assert self.supervisor.task is not None
        self.supervisor.task.add_done_callback(self.supervision_ended)
        tidy = asyncio.create_task(heap.keep_tidy(lambda: self.supervisor.stats.steps))
        collected = asyncio.create_task(heap.keep_collected(self.opened))
        told = asyncio.create_task(self.unit.run(lambda: not self.supervisor.failing, lambda: self.supervisor.phase))
        return [tidy, collected, told]

    async def _end(self, helpers: list[asyncio.Task[None]]) -> None:
        for task in helpers:
            task.cancel()
        await self.supervisor.stop()
        await self.closed()

    def started(self) -> None:
        """Logs at the engine's first start that the server is up."""
        if not self.said:
            self.said = True
            self.unit.started()
            logs.say_started(self.address)

    def fatal(self, message: str, code: int) -> None:
        """The first start has failed: ends the server with one last line."""
        self.code, self.last_words = code, message
        self.stop_now()

    def supervision_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("supervision failed", exc_info=task.exception())
            self.code = 1
            self.stop_now()

    def drain(self, terminated: bool) -> None:
        """Reacts to the first signal."""
        self.unit.stopping()
        self.draining = asyncio.create_task(self._drain(self.settings.server.drain_delay if terminated else 0.0))

    async def _drain(self, delay: float) -> None:
        """Takes requests for ``delay`` seconds more, since balancers notice a failing probe late; then drains."""
        supervisor, seconds = self.supervisor, float(self.settings.server.shutdown_timeout)
        if delay and supervisor.accepting:
            supervisor.leave()
            log.info("taking requests for %g s more (--drain-delay); a second signal stops at once", delay)
            await asyncio.sleep(delay)
        end = time.monotonic() + seconds
        if self.takes_turns:
            if waiting := self.waiting():
                supervisor.leave()
                log.info("%d requests wait for their turn; they are taken, at most for %g s", waiting, seconds)
            left = await self.close_turns(seconds)
            if left:
                log.error("%d requests had no turn in %g s (--shutdown-timeout): they end with an error", left, seconds)
                self.code = 1
            seconds = max(end - time.monotonic(), 0.0)
        if supervisor.open_requests:
            line = "finishing %d requests, at most %g s; a second signal stops at once"
            log.info(line, supervisor.open_requests, seconds)
        await supervisor.drain(seconds)
        if supervisor.stopping:
            return
        if supervisor.open_requests:
            line = "%d requests did not finish in %g s (--shutdown-timeout): they end with an error"
            log.error(line, supervisor.open_requests, seconds)
            self.code = 1
            self.stop_now()
        else:
            self.leave()

    def stop_now(self) -> None:
        """Stops at once, at the second signal or when time is up: kills the engine, so open streams end with an error.

        uvicorn's ``force_exit`` would cancel the lifespan task, which logs a traceback.
        """
        self.supervisor.kill()
        self.leave(CUT_SECONDS)


class WebServing(Serving):
    """One process: the app runs in it too."""

    def __init__(self, settings: Settings, supervisor: Supervisor | Fleet, app: FastAPI, sock: socket.socket) -> None:
        from trencadis.server.http.web import make_server

        super().__init__(settings, supervisor, listen.address(sock, bool(settings.server.ssl_certfile)))
        self.state: AppState | None = getattr(app.state, "trencadis", None)
        self.sock = sock
        self.web = make_server(settings.server, app, FLUSH_SECONDS)

    async def serve(self) -> None:
        """See ``Serving``."""
        await self.web.serve(sockets=[self.sock])

    def leave(self, seconds: int = FLUSH_SECONDS) -> None:
        """See ``Serving``."""
        self.web.leave(seconds)

    def again(self) -> Sequence[Callable[[], None]]:
        """See ``Serving``."""
        return reloads(self.web.certificates, self.state)

    def stop_now(self) -> None:
        """See ``Serving``."""
        if self.turns is not None:
            self.turns.stop()
        super().stop_now()

    def opened(self) -> int:
        """See ``Serving``."""
        return len(self.web.server_state.tasks)

    @property
    def turns(self) -> Turns | None:
        """The turns of tenants."""
        return None if self.state is None else self.state.turns

    @property
    def takes_turns(self) -> bool:
        """See ``Serving``."""
        return self.turns is not None

    def waiting(self) -> int:
        """See ``Serving``."""
        return 0 if self.turns is None else self.turns.waiting

    async def close_turns(self, seconds: float) -> int:
        """See ``Serving``."""
        return 0 if self.turns is None else await self.turns.close(seconds)

    async def closed(self) -> None:
        """See ``Serving``."""
        if self.state is not None and self.state.traces is not None:
            await asyncio.to_thread(self.state.traces.close, TRACES_SECONDS)


def reloads(certificates: Certificates | None, state: AppState | None) -> Sequence[Callable[[], None]]:
    """What an API process reads again when it is asked to: certificates and keys."""
    again = [] if certificates is None else [certificates.renew]
    if state is not None and state.tenants is not None:
        again.append(state.tenants.reload)
    return again
