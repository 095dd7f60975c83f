"""All API processes: what they are told of the engines, what they ask, and what is left of those that have ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from trencadis.core.errors import NotFound
from trencadis.core.process import wire
from trencadis.server.config.settings import Settings
from trencadis.server.engine.protocol import EngineClient, replicas
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.fleet.fleet import Fleet
from trencadis.server.front import messages
from trencadis.server.front.channel import Channel
from trencadis.server.front.part import TURNS
from trencadis.server.front.process import ApiProcess
from trencadis.server.front.relay import RequestRelay
from trencadis.server.front.table import SharedTable

if TYPE_CHECKING:
    from trencadis.server.front.figures import Figures

log = logging.getLogger("trencadis.server")

TELL_EVERY = 0.1
"""Seconds between two looks at what the engines do, which API processes are told if it has changed."""
ASK_SECONDS = 2.0
"""Seconds in which an API process gives its figures; those of one that does not are the last that it gave."""
TRIES = 3
"""Times that a process is started again while the server itself starts."""
KEEP_EVERY = 10.0
"""Seconds between two readings of figures that nobody asked for: what they count outlives its process."""


class ApiProcesses:
    """The processes behind one address, over one engine or several.

    Args:
        listen: a socket for each process that is started, as ``ApiProcess`` takes it.
        on_built: called when one takes connections.
        on_failed: called with (message, exit code) of a process that cannot start, before all have been up once.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[bool], socket.socket],
        on_built: Callable[[], None] = lambda: None,
        on_failed: Callable[[str, int], None] = lambda message, code: None,
    ) -> None:
        count = settings.server.api_server_count
        self.settings, self.on_built, self.on_failed = settings, on_built, on_failed
        self.table = SharedTable.create(count)
        self.engine: Supervisor | Fleet | None = None
        self.figures: Figures | None = None
        self.all_built = False
        self._vocabulary = b""
        self._told: tuple[bytes, list[tuple[Any, Any]]] = b"", []
        self._poked = asyncio.Event()
        self.each: list[ApiProcess] = []
        try:
            for index in range(count):
                self.each.append(ApiProcess(self, index, settings.server.data_parallel_size, listen))
        except BaseException:
            self.close()
            raise

    def over(self, engine: Supervisor | Fleet) -> None:
        """``engine`` runs the requests of all. What figures need is imported now, while API processes start."""
        from trencadis.server.front.figures import Figures

        self.engine = engine
        self.figures = Figures(self.settings, engine, lambda: self.table.total(TURNS))
        engine.vocabulary = lambda: self._vocabulary

    # --- life ---

    async def run(self) -> None:
        """Until all have left."""
        helpers = [asyncio.create_task(self._tell()), asyncio.create_task(self._keep())]
        try:
            await asyncio.gather(*(one.run() for one in self.each))
        finally:
            for task in helpers:
                task.cancel()

    def leave(self, seconds: int) -> None:
        """Tells all to finish their answers within ``seconds``, and to exit."""
        self.poke()
        for one in self.each:
            one.leave(seconds)

    @property
    def waiting(self) -> int:
        """Requests that wait for their tenant's turn, as of the last second."""
        return self.table.total(TURNS)

    async def close_turns(self, seconds: float) -> int:
        """Has all take no more requests; returns how many had no turn within ``seconds``."""
        left = await asyncio.gather(*self._asked("close turns", {"seconds": seconds}), return_exceptions=True)
        return sum(int(one) for one in left if isinstance(one, bytes))

    def reload(self) -> None:
        """Has all read keys and certificates again."""
        self._send_all(messages.Reload())

    def close(self) -> None:
        """Ends all at once."""
        for one in self.each:
            one.close()

    # --- what a process does (``Owner``) ---

    def relay(self, index: int, channel: Channel[messages.Up]) -> RequestRelay:
        """What runs the requests of a process."""
        assert self.engine is not None
        return RequestRelay(self.engine, index, channel.write, len(replicas(self.engine)) > 1, self._learn_vocabulary)

    def connected(self, process: ApiProcess) -> None:
        """Tells a new process all that the others know."""
        assert process.channel is not None
        told, known = self._told
        for i, (info, plan) in enumerate(known):
            process.channel.write(messages.Known(i, info, plan))
        if told:
            process.channel.write(msgspec.msgpack.decode(told, type=messages.EngineStates))

    def built(self, process: ApiProcess, max_model_len: int) -> None:
        """A process takes connections."""
        if self.figures is not None and max_model_len:
            self.figures.begin(max_model_len)
        if all(one.up is not None for one in self.each):
            self.all_built = True
            self.on_built()

    def failed(self, process: ApiProcess, message: str, code: int) -> None:
        """A process cannot start: at the server's start that ends it, later it is tried again."""
        if not self.all_built:
            process.refused = True
            self.on_failed(message, code)
        else:
            log.error("API process %d cannot start: %s", process.index, message)

    def ended(self, process: ApiProcess) -> None:
        """What a process held is free again; what it counted stays counted."""
        if not (self.all_built or process.leaving or process.refused) and process.restarts >= TRIES:
            self.failed(process, f"API process {process.index} ends again and again before it serves.", 1)
        self.table.forget(process.index)
        if self.figures is not None:
            self.figures.ended(process.index)

    def reset(self, message: wire.Resets) -> None:
        """Forgets what an engine's cache holds."""
        assert self.engine is not None
        if isinstance(message, wire.ResetPrefixCache):
            self.engine.reset_prefix_cache()
        else:
            self.engine.reset_encoder_cache()

    def _learn_vocabulary(self, data: bytes) -> None:
        self._vocabulary = data

    # --- what processes are told ---

    def poke(self) -> None:
        """The engines' state has changed."""
        self._poked.set()

    async def _tell(self) -> None:
        while True:
            self._tell_now()
            self._poked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_EVERY):
                    await self._poked.wait()

    def _tell_now(self) -> None:
        assert self.engine is not None
        engines = replicas(self.engine)
        told, known = self._told
        known = known or [(None, None)] * len(engines)
        for i, engine in enumerate(engines):
            info, plan = engine.info, engine.plan
            if info is not known[i][0] or plan is not known[i][1]:
                known[i] = info, plan
                self._send_all(messages.Known(i, info, plan))
        state = messages.EngineStates(
            [state_of(engine) for engine in engines], [counters_of(engine) for engine in engines]
        )
        now = msgspec.msgpack.encode(state)
        if now != told:
            self._send_all(state)
        self._told = now, known

    def _send_all(self, message: msgspec.Struct) -> None:
        for one in self.each:
            if one.channel is not None:
                one.channel.write(message)

    # --- what processes ask ---

    async def answer(self, what: str, given: dict[str, Any]) -> bytes:
        """A question of an API process.

        Raises:
            TrencadisError: as what was asked for raises it.
        """
        assert self.engine is not None and self.figures is not None
        match what:
            case "metrics":
                await self._read()
                return self.figures.text()
            case "buckets":
                return self.figures.buckets()
            case "sleep":
                await self._engine(given["replica"]).sleep(given["level"], given["abort"])
            case "wake":
                await self._engine(given["replica"]).wake()
            case "media":
                return await self._media(given)
            case "forget media":
                await asyncio.gather(*self._asked("forget media", given), return_exceptions=True)
            case _:
                raise NotFound(f"Nobody answers {what} here.")
        self._tell_now()
        return b""

    def _engine(self, replica: int) -> EngineClient:
        assert self.engine is not None
        return self.engine if replica < 0 else replicas(self.engine)[replica]

    def _asked(self, what: str, given: dict[str, Any]) -> list[Any]:
        return [one.channel.ask(what, **given) for one in self.each if one.channel is not None and one.up is not None]

    async def _media(self, given: dict[str, Any]) -> bytes:
        """What the first process that has a medium gives; nothing if none has it."""
        for found in await asyncio.gather(*self._asked("media", given), return_exceptions=True):
            if isinstance(found, bytes):
                return found
        return b""

    async def _read(self) -> None:
        """Takes the figures of every process that gives them in time."""
        assert self.figures is not None

        async def one(process: ApiProcess) -> None:
            assert process.channel is not None and self.figures is not None
            async with asyncio.timeout(ASK_SECONDS):
                self.figures.learn(process.index, await process.channel.ask("figures"))

        up = [process for process in self.each if process.up is not None and process.channel is not None]
        await asyncio.gather(*map(one, up), return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(KEEP_EVERY)
            await self._read()


def state_of(engine: EngineClient) -> messages.ReplicaState:
    """How one engine is."""
    return messages.ReplicaState(
        engine.phase, engine.accepting, engine.healthy, engine.ready, engine.failing,
        bool(getattr(engine, "stopping", False)), engine.restarts, engine.sleep_level, engine.under_way,
        engine.progress,
    )  # fmt: skip


def counters_of(engine: EngineClient) -> wire.EngineStats:
    """An engine's counters, without the lists of what is new since the last message, and without its plan."""
    return dataclasses.replace(
        engine.stats, step_tokens=[], buckets=[], evicted_blocks=b"", evicted_images=b"", plan=None
    )
