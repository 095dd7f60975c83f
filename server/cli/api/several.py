"""``trencadis serve --api-server-count N``: this process has the engines, N others have the apps."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trencadis.server.cli.api.serving import FLUSH_SECONDS, Serving
from trencadis.server.config.settings import Settings
from trencadis.server.http import listen

if TYPE_CHECKING:
    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.fleet.fleet import Fleet
    from trencadis.server.front.processes import ApiProcesses

log = logging.getLogger("trencadis.server")

GRACE_SECONDS = 5.0
"""Seconds beyond those for the last answers after which an API process is killed."""


def serve_by_several(
    settings: Settings, sock: socket.socket, supervise: Callable[[], Supervisor | Fleet], begun: float
) -> int:
    """Starts the API processes, which build their apps while engines load; serves; returns the exit code.

    Args:
        sock: claims the address; a unix socket is shared, else each process gets a socket of its own.
        supervise: what keeps the engines running, which are spawned already.
        begun: ``time.monotonic`` of the start.
    """
    address = listen.address(sock, bool(settings.server.ssl_certfile))
    again = listeners(sock)
    from trencadis.server.front.processes import ApiProcesses

    log.info("starting %d API processes", settings.server.api_server_count)
    processes = ApiProcesses(settings, again)
    try:
        supervisor = supervise()
        processes.over(supervisor)
        gc.collect()
        gc.freeze()
        return FrontServing(settings, supervisor, processes, address, begun).to_the_end()
    finally:
        processes.close()


def listeners(sock: socket.socket) -> Callable[[bool], socket.socket]:
    """Gives a socket for each API process that is started; ``sock`` has shown that the address is free.

    Those of the start listen at once, as the socket of one process does. That of a process that replaces a dead one
    listens when its app is built, so that connections come to the others meanwhile.
    """
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return lambda now: socket.socket(fileno=os.dup(sock.fileno()))
    sock.close()
    return lambda now: listen.listen_again(name, now)


class FrontServing(Serving):
    """The process that has the engines, and starts the API processes."""

    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor | Fleet,
        processes: ApiProcesses,
        address: str,
        begun: float,
    ) -> None:
        super().__init__(settings, supervisor, address)
        self.processes, self._begun = processes, begun
        self._told_built = False
        self._latest: asyncio.TimerHandle | None = None
        processes.on_built, processes.on_failed = self._built, self.fatal

    async def serve(self) -> None:
        """See ``Serving``."""
        await self.processes.run()

    def leave(self, seconds: int = FLUSH_SECONDS) -> None:
        """See ``Serving``; a process that does not end in time is killed."""
        self.processes.leave(seconds)
        if self._latest is not None:
            self._latest.cancel()
        self._latest = asyncio.get_running_loop().call_later(seconds + GRACE_SECONDS, self.processes.close)

    def drain(self, terminated: bool) -> None:
        """See ``Serving``; probes shall fail at once."""
        super().drain(terminated)
        asyncio.get_running_loop().call_later(0.001, self.processes.poke)

    def again(self) -> Sequence[Callable[[], None]]:
        """See ``Serving``."""
        server = self.settings.server
        return [self.processes.reload] if server.api_key_file or server.ssl_certfile else []

    @property
    def takes_turns(self) -> bool:
        """See ``Serving``."""
        return bool(self.settings.server.api_key_file) and self.settings.engine.scheduling_policy == "fair"

    def waiting(self) -> int:
        """See ``Serving``."""
        return self.processes.waiting

    async def close_turns(self, seconds: float) -> int:
        """See ``Serving``."""
        return await self.processes.close_turns(seconds)

    def _built(self) -> None:
        """All API processes are up."""
        if not self._told_built:
            self._told_built = True
            log.info("app built (%.1f s)", time.monotonic() - self._begun)
            if self.supervisor.info is not None:
                self.started()

    def started(self) -> None:
        """Logs that the server is up, once engine and API processes are."""
        if self.processes.all_built:
            super().started()
