"""One API server process as the front process sees it: start, watchdog and restart, and its requests.

The front process forwards the requests to the engine, and their deltas back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

import msgspec

from trencadis.core.errors import StartupError, TrencadisError
from trencadis.core.json_types import JsonObject
from trencadis.core.process import engine_messages
from trencadis.core.process.child_process_environment_and_exit import StopWatch, python_path, spawn_child
from trencadis.core.request import Delta, Request
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.engine.engine_client_and_request_timing import DeltaCallback, Pixels
from trencadis.server.engine.engine_process_link import RemotePixels, RequestLink
from trencadis.server.metrics.process_tenant_and_sleep_collectors import API_MODULE
from trencadis.server.processes import ipc_messages_and_channel
from trencadis.server.processes.ipc_messages_and_channel import Channel, DeltaBatch, RequestRouted, Requests
from trencadis.server.tenants.shared_limits_table import SharedTable

log = logging.getLogger("trencadis.server")


class RequestRunner(Protocol):
    """Protocol of an engine that runs requests."""

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncIterator[Delta]:
        """See ``EngineClient``."""
        ...

    def abort(self, id: str, choice: int = -1) -> None:
        """See ``EngineClient``."""
        ...

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """See ``EngineClient``."""
        ...


class RelayedRequest(RemotePixels):
    """A request of an API process that the front process runs on the engine.

    Args:
        own: its id in the API process; the engine uses another one, as two processes may choose the same.
        request: the request that the engine gets.
    """

    def __init__(self, relay: RequestRelay, own: str, request: Request) -> None:
        super().__init__(len(request.spans), self._request_media)
        self.relay, self.local_id, self.request = relay, own, request
        self.engine_link: RequestLink | None = None
        """Link of the engine that needs its pixels; changes if the first engine dies."""
        self.task: asyncio.Task[None] | None = None

    def forward(self, delta: Delta) -> bool:
        """Sends a delta to the API process, with the request's id there.

        Returns False if the process reads too slowly: the delta then waits in the request's queue, which is bounded.
        """
        if self.relay.is_full():
            return False
        delta.id = self.local_id
        self.relay.forward(delta)
        return True

    def _request_media(self, link: RequestLink, index: int) -> None:
        self.engine_link = link
        self.relay.write(engine_messages.NeedMedia(self.local_id, index))


class RequestRelay:
    """The open requests of one API process.

    Args:
        index: number of the API process.
        write: sends a message to the API process.
        several: True if it is sent the engine of each request.
        on_vocabulary: called with the packed vocabulary, which it sends before its first grammar.
        is_full: True if the API process reads too slowly for more to be written.
        wait_for_room: returns once it is not full any more, or the process has ended.
    """

    def __init__(
        self,
        engine: RequestRunner,
        index: int,
        write: Callable[[msgspec.Struct], None],
        several: bool,
        on_vocabulary: Callable[[bytes], None],
        is_full: Callable[[], bool] = lambda: False,
        wait_for_room: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        self.is_full, self._wait_for_room = is_full, wait_for_room
        self._engine, self._index, self._has_replicas, self._on_vocabulary = engine, index, several, on_vocabulary
        self.write = write
        self.requests: dict[str, RelayedRequest] = {}
        self._outgoing: list[Delta] = []
        self._vocabulary = bytearray()

    async def receive(self, message: Requests, payload: bytes) -> None:
        """Handles a message of the API process."""
        match message:
            case engine_messages.Add(request):
                self._add(request)
            case engine_messages.Abort(ids, choice):
                for id in ids:
                    self._abort(id, choice)
            case engine_messages.Media() | engine_messages.MediaFailed():
                await self._media(message, payload)
            case engine_messages.VocabularyPart(offset, total):
                if not offset:
                    self._vocabulary = bytearray()
                self._vocabulary += payload
                if len(self._vocabulary) == total:
                    self._on_vocabulary(bytes(self._vocabulary))
                    self._vocabulary = bytearray()

    def close(self) -> None:
        """Aborts all requests in the engine, since the API process has ended."""
        for found in self.requests.values():
            if found.task is not None:
                found.task.cancel()

    def forward(self, delta: Delta) -> None:
        """Sends a delta together with all others of this iteration of the event loop."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(delta)

    def _flush(self) -> None:
        items, self._outgoing = self._outgoing, []
        self.write(DeltaBatch(items))

    def _add(self, request: Request) -> None:
        own, request.id = request.id, f"{self._index}-{request.id}"
        found = self.requests[own] = RelayedRequest(self, own, request)
        found.task = asyncio.create_task(self._run(found))
        # Not in the task itself: a task that is cancelled before it begins runs none of its code.
        found.task.add_done_callback(lambda task: self.requests.pop(own, None))

    def _abort(self, own: str, choice: int) -> None:
        found = self.requests.get(own)
        if found is None:
            return
        if choice < 0 and found.task is not None:
            # The request may still wait for an engine, which could not abort it yet.
            found.task.cancel()
        else:
            self._engine.abort(found.request.id, choice)

    async def _media(self, message: engine_messages.Media | engine_messages.MediaFailed, payload: bytes) -> None:
        found = self.requests.get(message.id)
        if found is not None and found.engine_link is not None and found.request.id in found.engine_link.requests:
            message.id = found.request.id
            await found.engine_link.send(message, payload)

    async def _run(self, found: RelayedRequest) -> None:
        """Forwards the first delta of a request and the last one of each choice; a callback forwards the others."""
        try:
            deltas, begun = cast(Any, self._engine.submit(found.request, found)), False
            async with aclosing(deltas):
                async for delta in deltas:
                    if not begun:
                        begun = True
                        if self._has_replicas:
                            self.write(RequestRouted(found.local_id, found.request.replica))
                        self._engine.set_delta_callback(found.request.id, found.forward)
                    if self.is_full():
                        await self._wait_for_room()
                    delta.id = found.local_id
                    self.forward(delta)
        except TrencadisError as error:
            self._fail(found, error.status, error.message)
        except Exception:
            log.exception("request %s failed", found.request.id)
            self._fail(found, TrencadisError.status, "Internal server error.")

    def _fail(self, found: RelayedRequest, status: int, message: str) -> None:
        for choice in range(found.request.params.n):
            self.forward(Delta(found.local_id, choice, finish="error", status=status, message=message))


FIRST_DELAY, MAX_DELAY = 0.1, 30.0
STEADY_SECONDS = 60.0
UNRESPONSIVE_SECONDS = 60
"""Seconds without an answer after which an API process is killed; time in which the front process itself does not run
is not counted.
"""
END_SECONDS = 3.0


class ApiProcessOwner(Protocol):
    """Protocol of the owner of all API processes (``server/processes/api_process_manager.py``)."""

    settings: Settings
    table: SharedTable

    def make_relay(self, index: int, channel: Channel[ipc_messages_and_channel.Up]) -> RequestRelay: ...
    def on_connected(self, process: ApiProcess) -> None: ...
    def on_ready(self, process: ApiProcess, max_model_len: int) -> None: ...
    def on_failed_start(self, process: ApiProcess, message: str, code: int) -> None: ...
    def on_ended(self, process: ApiProcess) -> None: ...
    def reset_cache(self, message: engine_messages.Resets) -> None: ...
    async def answer(self, method: str, arguments: JsonObject) -> bytes: ...


class ApiProcess:
    """Supervises API process ``index``.

    Args:
        listen: makes a socket for each started process, which owns it; its argument is True if it must listen at once.
    """

    def __init__(
        self, owner: ApiProcessOwner, index: int, replicas: int, listen: Callable[[bool], socket.socket]
    ) -> None:
        self.owner, self.index, self._replicas, self._listen = owner, index, replicas, listen
        self.restarts = 0
        self.ready_since: float | None = None
        """Time at which it began to accept connections."""
        self.leaving = False
        self.refused = False
        """True if it cannot start at all, and is not restarted."""
        self._leaving_event = asyncio.Event()
        self._leave_seconds = 0
        """Seconds for its last answers once it leaves."""
        self._running = False
        self.handle: subprocess.Popen[bytes] | None = None
        self.channel: Channel[ipc_messages_and_channel.Up] | None = None
        self._relay: RequestRelay | None = None
        self._sock, self._listener = self._spawn()

    def _spawn(self) -> tuple[socket.socket, socket.socket]:
        """Starts the process and sends it the serve order; its app takes a second or more to build."""
        listener = self._listen(not self.restarts)
        table = self.owner.table.descriptor
        environ = {**os.environ, "PYTHONPATH": python_path(os.environ)}
        self.handle, ours = spawn_child(API_MODULE, environ, str(self.index), shared=(listener.fileno(), table))
        settings = self.owner.settings
        served = dataclasses.replace(settings, engine=settings.engine.without_secrets())
        count = self.owner.table.count
        ours.sendall(
            ipc_messages_and_channel.make_frame(
                ipc_messages_and_channel.ServeOrder(served, self.index, count, self._replicas, listener.fileno(), table)
            )
        )
        return ours, listener

    # --- life ---

    async def run(self) -> None:
        """Supervises one API process; restarts it unless it is to stop."""
        self._running = True
        try:
            await self._run()
        finally:
            self._running = False

    async def _run(self) -> None:
        delay, started = FIRST_DELAY, True
        while True:
            if started:
                await self._serve()
            if self.leaving or self.refused:
                return
            if self.ready_since is not None and time.monotonic() - self.ready_since > STEADY_SECONDS:
                delay = FIRST_DELAY
            self.ready_since = None
            self.restarts += 1
            code = None if self.handle is None else self.handle.returncode
            log.error("API process %d ended (exit code %s); restart in %g s", self.index, code, delay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._leaving_event.wait()
            delay = min(2 * delay, MAX_DELAY)
            if self.leaving:
                return
            started = self._start_again()

    def _start_again(self) -> bool:
        """Starts another process; returns False if that failed."""
        try:
            self._sock, self._listener = self._spawn()
        except (OSError, StartupError) as error:
            log.error("API process %d cannot be started: %s", self.index, error)
            return False
        return True

    async def _serve(self) -> None:
        """Handles one process from its first frame to its end."""
        channel = self.channel = Channel(
            self._sock, ipc_messages_and_channel.decode_up, self._receive, self.owner.answer
        )
        self._relay = self.owner.make_relay(self.index, channel)
        await channel.connect()
        self.owner.on_connected(self)
        if self.leaving:
            # the order to leave came before the channel was open
            channel.write(ipc_messages_and_channel.LeaveOrder(self._leave_seconds))
        watching = asyncio.create_task(self._watch(channel))
        try:
            await channel.run()
        except Exception:
            log.exception("a frame of API process %d could not be read", self.index)
            self.kill()
        finally:
            watching.cancel()
            self._relay.close()
            self._listener.close()
            await self._reap()
            self.owner.on_ended(self)

    async def _reap(self) -> None:
        """Waits briefly for a process whose socket has ended to exit by itself, then kills it."""
        end = time.monotonic() + END_SECONDS
        while self.handle is not None and self.handle.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.kill()

    async def _watch(self, channel: Channel[ipc_messages_and_channel.Up]) -> None:
        """Kills a process whose event loop no longer answers, or that is stopped, also while it starts."""
        starting = StopWatch(self.handle)
        while True:
            await asyncio.sleep(1.0)
            if self.ready_since is None:
                alive = not starting.look()
            else:
                alive = await _is_responsive(channel, StopWatch(self.handle))
            if not alive:
                log.error("API process %d killed: it gives no sign of life", self.index)
                self.kill()

    def _receive(self, message: ipc_messages_and_channel.Up, payload: bytes) -> Any:
        match message:
            case ipc_messages_and_channel.ApiReady(max_model_len):
                # From now on the socket ends with the process, and the system sends it no more connections.
                self._listener.close()
                self.ready_since = time.monotonic()
                self.owner.on_ready(self, max_model_len)
            case ipc_messages_and_channel.ApiFailed(text, code):
                self.owner.on_failed_start(self, text, code)
            case engine_messages.ResetPrefixCache() | engine_messages.ResetEncoderCache():
                self.owner.reset_cache(message)
            case ipc_messages_and_channel.FrontQuestion() | ipc_messages_and_channel.FrontReply():
                pass  # handled by the channel itself
            case _:
                assert self._relay is not None
                return self._relay.receive(message, payload)
        return None

    def leave(self, seconds: int) -> None:
        """Asks the process to finish its answers and to exit."""
        self.leaving, self._leave_seconds = True, seconds
        self._leaving_event.set()
        if self.channel is not None:
            self.channel.write(ipc_messages_and_channel.LeaveOrder(seconds))

    def kill(self) -> None:
        """Kills the process and reaps it."""
        if self.handle is not None:
            with contextlib.suppress(OSError):
                self.handle.kill()
            self.handle.wait()

    def close(self) -> None:
        """Ends the process, even if ``run`` never ran.

        While ``run`` runs the socket stays open: ``run`` ends with the end of file there, while the event loop would
        not notice a descriptor that is closed under it.
        """
        self.leaving = True
        self._leaving_event.set()
        self.kill()
        if not self._running:
            self._listener.close()
            self._sock.close()


async def _is_responsive(channel: Channel[ipc_messages_and_channel.Up], stops: StopWatch) -> bool:
    """True if the API process replies within ``UNRESPONSIVE_SECONDS``, or its channel has closed.

    False as soon as it is stopped.
    """
    asked = asyncio.ensure_future(channel.ask("alive"))
    try:
        for _ in range(UNRESPONSIVE_SECONDS):
            if (await asyncio.wait([asked], timeout=1.0))[0]:
                return True
            if stops.look():
                return False
        return False
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
