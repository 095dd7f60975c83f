"""The engine client of an API process whose engine runs under the front process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from trencadis.core.errors import NotFound, Unavailable
from trencadis.core.json_types import JsonObject
from trencadis.core.process import engine_messages
from trencadis.core.process.log_setup import flush_logs
from trencadis.core.request import Delta, Request
from trencadis.server.engine.engine_client_and_request_timing import (
    DeltaCallback,
    MakeVocabulary,
    Pixels,
    pack_vocabulary,
)
from trencadis.server.engine.engine_process_link import RequestLink
from trencadis.server.processes import combined_engine_state, ipc_messages_and_channel
from trencadis.server.processes.combined_engine_state import EngineGroup
from trencadis.server.processes.ipc_messages_and_channel import Channel
from trencadis.server.routes.shared_state_of_api_processes import Answer, SharedProcessState
from trencadis.server.tenants.shared_limits_table import SharedTable

log = logging.getLogger("trencadis.server")


class FrontLink(RequestLink):
    """Connection of an API process to the front process: sends requests, receives deltas and engine states.

    Args:
        replicas: number of engines.
        table: the shared counters of API processes.
    """

    def __init__(self, sock: socket.socket, replicas: int, table: SharedTable) -> None:
        super().__init__(lambda: pack_vocabulary(self.make_vocabulary))
        self.channel: Channel[ipc_messages_and_channel.Down] = Channel(
            sock, ipc_messages_and_channel.decode_down, self._receive, self._answer
        )
        self.on_info: list[Callable[[engine_messages.EngineInfo], None]] = []
        self.replicas = [RemoteReplica(self, i) for i in range(replicas)]
        self.make_vocabulary: MakeVocabulary | None = None
        self.answers: dict[str, Answer] = {}
        """Handlers of questions from the front process."""
        self.shared = SharedProcessState(self.channel, self.answers, table)
        self.commands: dict[type[msgspec.Struct], Callable[[Any], None]] = {}
        """Handlers of ``ReloadOrder`` and ``LeaveOrder``."""
        self._sent: dict[str, Request] = {}

    async def run(self) -> None:
        """Reads until the front process has closed the connection; then ends this process."""
        await self.channel.connect()
        self.writer = self.channel.writer
        feeding = asyncio.create_task(self.send_media())
        try:
            await self.channel.run()
        except Exception:
            log.exception("a frame of the front could not be read")
        finally:
            feeding.cancel()
        # No request here can be finished now, and uvicorn would wait for them. A cancelled link does not get here.
        flush_logs()
        os._exit(1)

    async def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """See ``RequestLink``; ``request.replica`` is set to the engine that runs it, once that is known."""
        self._sent[request.id] = request
        try:
            async with aclosing(super().submit(request, pixels)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._sent.pop(request.id, None)

    async def _answer(self, what: str, given: JsonObject) -> bytes:
        if what not in self.answers:
            raise NotFound(f"Nobody answers {what} here.")
        return await self.answers[what](given)

    def _receive(self, message: ipc_messages_and_channel.Down, payload: bytes) -> Awaitable[None] | None:
        if isinstance(message, ipc_messages_and_channel.DeltaBatch):
            return self.deliver_all(message.items)
        self._handle_message(message)
        return None

    def _handle_message(self, message: ipc_messages_and_channel.Down) -> None:
        match message:
            case engine_messages.NeedMedia(id, index):
                self.request_media(id, index)
            case ipc_messages_and_channel.RequestRouted(id, replica):
                if id in self._sent:
                    self._sent[id].replica = replica
            case ipc_messages_and_channel.EngineStates(states, stats):
                for one, state, counters in zip(self.replicas, states, stats, strict=True):
                    one.state, one.stats = state, counters
            case ipc_messages_and_channel.ReplicaInfo():
                self._update_replica(message)
            case _:
                self.commands[type(message)](message)

    def _update_replica(self, known: ipc_messages_and_channel.ReplicaInfo) -> None:
        one = self.replicas[known.replica]
        one.plan = known.plan
        if known.info is not None and known.info != one.info:
            one.info = known.info
            together = combined_engine_state.merge_infos([other.info for other in self.replicas])
            if together is not None and all(other.info is not None for other in self.replicas):
                for listener in self.on_info:
                    listener(together)


class FrontOperations:
    """The operations of ``EngineClient`` that are the same for one engine and for all: the front process does them.

    Args:
        index: of the engine; -1: all of them.
    """

    def __init__(self, link: FrontLink, index: int) -> None:
        self.link, self.index = link, index
        self.observers: list[Callable[[engine_messages.EngineStats], None]] = []
        """Never called: the front process counts what engines do."""
        self.on_operation: list[Callable[[str, float], None]] = []
        self.on_info = link.on_info

    @property
    def open_requests(self) -> int:
        """Number of requests of this process in an engine, or on their way there."""
        return len(self.link.requests) + self.link.entering

    def abort(self, id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it."""
        self.link.abort(id, choice)

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """See ``EngineClient``."""
        self.link.set_delta_callback(id, callback)

    def reset_prefix_cache(self) -> None:
        """Makes all cached blocks unavailable to later requests, in every engine."""
        self.link.channel.write(engine_messages.ResetPrefixCache())

    def reset_encoder_cache(self) -> None:
        """Drops embeddings of images that no running request waits for, in every engine."""
        self.link.channel.write(engine_messages.ResetEncoderCache())

    async def learn_buckets(self, force: bool = False) -> None:
        """Starts a search in every engine; see ``EngineClient``."""
        await self.link.channel.ask("learn buckets", force=force)

    async def sleep(self, level: int = 1, abort: bool = False) -> None:
        """Ends the engines' processes once the requests of all API processes have ended (``abort``: now).

        Raises:
            Unavailable: an engine loads, restarts or drains.
        """
        await self.link.channel.ask("sleep", replica=self.index, level=level, abort=abort)

    async def wake(self) -> None:
        """Starts the engines that sleep; returns when they accept requests.

        Raises:
            Unavailable: one did not start.
        """
        await self.link.channel.ask("wake", replica=self.index)


class RemoteReplica(FrontOperations):
    """One engine of the front process; see ``EngineClient``."""

    def __init__(self, link: FrontLink, index: int) -> None:
        super().__init__(link, index)
        self.state = ipc_messages_and_channel.ReplicaState()
        self.stats = engine_messages.EngineStats()
        self.info: engine_messages.EngineInfo | None = None
        self.plan: engine_messages.GraphPlan | None = None

    @property
    def phase(self) -> str:
        """Last state pushed by the front process."""
        return self.state.phase

    @property
    def accepting(self) -> bool:
        """True if it accepts requests."""
        return self.state.accepting

    @property
    def healthy(self) -> bool:
        """True if it is neither dead nor stalled."""
        return self.state.healthy

    @property
    def ready(self) -> bool:
        """True if it accepts requests and is warm."""
        return self.state.ready

    @property
    def failing(self) -> bool:
        """True if engines fail repeatedly."""
        return self.state.failing

    @property
    def stopping(self) -> bool:
        """True if the server is ending."""
        return self.state.stopping

    @property
    def restarts(self) -> int:
        """Number of engines that failed and were replaced."""
        return self.state.restarts

    @property
    def sleep_level(self) -> int:
        """0: awake."""
        return self.state.sleep_level

    @property
    def sleep_operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs, else empty."""
        return self.state.sleep_operation

    @property
    def progress(self) -> engine_messages.Phase | None:
        """The last phase of loading."""
        return self.state.progress

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """Submits a request and yields its deltas; closing the iterator aborts it.

        Raises:
            Unavailable: no engine accepts requests now.
        """
        if not self.accepting:
            raise Unavailable(f"The engine is not accepting requests ({self.phase}).", retry_after=5)
        return self.link.submit(request, pixels)


class RemoteFleet(FrontOperations, EngineGroup[RemoteReplica]):
    """Several engines of the front process; see ``EngineClient``."""

    def __init__(self, link: FrontLink) -> None:
        super().__init__(link, -1)
        self.engines = link.replicas

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """See ``RemoteReplica``."""
        if not self.accepting:
            raise Unavailable(f"No engine is accepting requests ({self.phase}).", retry_after=5)
        return self.link.submit(request, pixels)


RemoteEngines = RemoteReplica | RemoteFleet


def make_engine_client(link: FrontLink) -> RemoteEngines:
    """Returns the EngineClient for the app, over one engine or several."""
    return link.replicas[0] if len(link.replicas) == 1 else RemoteFleet(link)
