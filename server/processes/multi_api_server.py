"""``trencadis serve --api-server-count N``: this process has the engines, N other processes have the apps."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trencadis.server.config.resolve_settings import Settings
from trencadis.server.http import listener
from trencadis.server.processes.server_lifecycle import FLUSH_SECONDS, ServerLifecycle

if TYPE_CHECKING:
    from trencadis.server.engine.supervisor import Supervisor
    from trencadis.server.processes.api_process_manager import ApiProcessManager
    from trencadis.server.processes.multi_engine_client import Fleet

log = logging.getLogger("trencadis.server")

GRACE_SECONDS = 5.0
"""Seconds beyond those for the last answers after which an API process is killed."""


def run_multi_api_server(
    settings: Settings, sock: socket.socket, supervise: Callable[[], Supervisor | Fleet], begun: float
) -> int:
    """Starts the API processes, which build their apps while engines load; serves; returns the exit code.

    Args:
        sock: holds the address; a unix socket is shared, else each process gets a socket of its own.
        supervise: makes the supervisor of the engines, which are already spawned.
        begun: ``time.monotonic`` of the start.
    """
    address = listener.format_address(sock, bool(settings.server.ssl_certfile))
    again = make_listener_factory(sock)
    from trencadis.server.processes.api_process_manager import ApiProcessManager

    log.info("starting %d API processes", settings.server.api_server_count)
    processes = ApiProcessManager(settings, again)
    try:
        supervisor = supervise()
        processes.set_engine(supervisor)
        gc.collect()
        gc.freeze()
        return MultiProcessServer(settings, supervisor, processes, address, begun).run_to_end()
    finally:
        processes.close()


def make_listener_factory(sock: socket.socket) -> Callable[[bool], socket.socket]:
    """Returns a function that makes a socket for each API process; ``sock`` has shown that the address is free.

    Sockets of the first processes listen at once, as that of a single process does. The socket of a process that
    replaces a dead one listens when its app is built, so that connections go to the others meanwhile.
    """
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return lambda now: socket.socket(fileno=os.dup(sock.fileno()))
    sock.close()
    return lambda now: listener.open_shared_listener(name, now)


class MultiProcessServer(ServerLifecycle):
    """The process that has the engines, and starts the API processes."""

    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor | Fleet,
        processes: ApiProcessManager,
        address: str,
        begun: float,
    ) -> None:
        super().__init__(settings, supervisor, address)
        self.processes, self._begun = processes, begun
        self._ready_logged = False
        self._kill_timer: asyncio.TimerHandle | None = None
        processes.on_all_ready, processes.on_failed = self._on_all_built, self.on_fatal

    async def serve(self) -> None:
        """See ``ServerLifecycle``."""
        await self.processes.run()

    def shut_down(self, seconds: int = FLUSH_SECONDS) -> None:
        """See ``ServerLifecycle``; a process that does not end in time is killed."""
        self.processes.leave(seconds)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._kill_timer = asyncio.get_running_loop().call_later(seconds + GRACE_SECONDS, self.processes.close)

    def drain(self, terminated: bool) -> None:
        """See ``ServerLifecycle``; also makes probes fail at once."""
        super().drain(terminated)
        asyncio.get_running_loop().call_later(0.001, self.processes.notify_state_change)

    def get_reload_calls(self) -> Sequence[Callable[[], None]]:
        """See ``ServerLifecycle``."""
        server = self.settings.server
        return [self.processes.reload] if server.api_key_file or server.ssl_certfile else []

    @property
    def has_fair_queue(self) -> bool:
        """See ``ServerLifecycle``."""
        return bool(self.settings.server.api_key_file) and self.settings.engine.scheduling_policy == "fair"

    def count_fair_queued(self) -> int:
        """See ``ServerLifecycle``."""
        return self.processes.fair_queued

    async def drain_fair_queue(self, seconds: float) -> int:
        """See ``ServerLifecycle``."""
        return await self.processes.drain_fair_queues(seconds)

    def _on_all_built(self) -> None:
        """Logs that all API processes are up, once."""
        if not self._ready_logged:
            self._ready_logged = True
            log.info("app built (%.1f s)", time.monotonic() - self._begun)
            if self.supervisor.info is not None:
                self.log_started()

    def log_started(self) -> None:
        """Logs that the server is up, once engine and API processes are."""
        if self.processes.all_ready:
            super().log_started()
