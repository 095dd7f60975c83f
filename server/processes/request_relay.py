"""Runs the requests of one API process in the front process: forwards them to the engine, and their deltas back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

import msgspec

from trencadis.core.errors import TrencadisError
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta, Request
from trencadis.server.engine.engine_client import DeltaCallback, Pixels
from trencadis.server.engine.request_link import RemotePixels, RequestLink
from trencadis.server.processes.ipc_messages import DeltaBatch, RequestRouted, Requests

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
        """Sends a delta to the API process, with the request's id there; returns True."""
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
    """

    def __init__(
        self,
        engine: RequestRunner,
        index: int,
        write: Callable[[msgspec.Struct], None],
        several: bool,
        on_vocabulary: Callable[[bytes], None],
    ) -> None:
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
                    found.forward(delta)
        except TrencadisError as error:
            self._fail(found, error.status, error.message)
        except Exception:
            log.exception("request %s failed", found.request.id)
            self._fail(found, TrencadisError.status, "Internal server error.")

    def _fail(self, found: RelayedRequest, status: int, message: str) -> None:
        for choice in range(found.request.params.n):
            self.forward(Delta(found.local_id, choice, finish="error", status=status, message=message))
