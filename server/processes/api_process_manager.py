"""Manages the API server processes: starts them, pushes engine state to them and answers their requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from trencadis.core.errors import NotFound, TrencadisError
from trencadis.core.json_types import JsonObject
from trencadis.core.process import engine_messages
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.engine.engine_client_and_request_timing import EngineClient, get_replicas
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.processes import ipc_messages_and_channel
from trencadis.server.processes.api_process_supervisor import ApiProcess, RequestRelay
from trencadis.server.processes.ipc_messages_and_channel import Channel
from trencadis.server.processes.multi_engine_client import Fleet
from trencadis.server.routes.shared_state_of_api_processes import FAIR_QUEUED
from trencadis.server.tenants.shared_limits_table import SharedTable

if TYPE_CHECKING:
    from trencadis.server.processes.aggregated_metrics import AggregatedMetrics

log = logging.getLogger("trencadis.server")

STATE_INTERVAL = 0.1
"""Seconds between two checks of the engines' states, which are pushed to API processes if they have changed."""
METRICS_TIMEOUT = 2.0
"""Seconds within which an API process must report its metrics; otherwise its last report is used."""
MAX_START_RETRIES = 3
"""Maximum restarts of a process while the server itself starts."""
METRICS_INTERVAL = 10.0
"""Seconds between two collections of metrics without a request: counters then survive their process."""


class ApiProcessManager:
    """The API processes of one address, over one engine or several.

    Args:
        listen: makes a socket for each started process; see ``ApiProcess``.
        on_all_ready: called once all processes accept connections.
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
        self.settings, self.on_all_ready, self.on_failed = settings, on_built, on_failed
        self.table = SharedTable.create(count)
        self.engine: Supervisor | Fleet | None = None
        self.metrics: AggregatedMetrics | None = None
        self.all_ready = False
        self._vocabulary = b""
        self._last_states: tuple[bytes, list[tuple[Any, Any]]] = b"", []
        self._state_changed = asyncio.Event()
        self._adapter_changes: dict[str, JsonObject] = {}
        self._repeating: set[asyncio.Future[None]] = set()
        self.processes: list[ApiProcess] = []
        try:
            for index in range(count):
                self.processes.append(ApiProcess(self, index, settings.server.data_parallel_size, listen))
        except BaseException:
            self.close()
            raise

    def set_engine(self, engine: Supervisor | Fleet) -> None:
        """Sets the engine that runs the requests of all processes. Imports the metrics code now, while API processes
        start.
        """
        from trencadis.server.processes.aggregated_metrics import AggregatedMetrics

        self.engine = engine
        self.metrics = AggregatedMetrics(self.settings, engine, lambda: self.table.total(FAIR_QUEUED))
        engine.vocabulary = lambda: self._vocabulary

    # --- life ---

    async def run(self) -> None:
        """Runs until all processes have left."""
        helpers = [asyncio.create_task(self._push_states()), asyncio.create_task(self._collect_periodically())]
        try:
            await asyncio.gather(*(one.run() for one in self.processes))
        finally:
            for task in helpers:
                task.cancel()

    def leave(self, seconds: int) -> None:
        """Asks all processes to finish their answers within ``seconds``, and to exit."""
        self.notify_state_change()
        for one in self.processes:
            one.leave(seconds)

    @property
    def fair_queued(self) -> int:
        """Number of requests in the fair queues of all API processes, as of the last second."""
        return self.table.total(FAIR_QUEUED)

    async def drain_fair_queues(self, seconds: float) -> int:
        """Closes the fair queues of all processes; returns how many requests were not admitted within ``seconds``."""
        left = await asyncio.gather(*self._ask_all("close turns", {"seconds": seconds}), return_exceptions=True)
        return sum(int(one) for one in left if isinstance(one, bytes))

    def reload(self) -> None:
        """Makes all processes read keys and certificates again."""
        self._send_all(ipc_messages_and_channel.ReloadOrder())

    def close(self) -> None:
        """Kills all processes."""
        for one in self.processes:
            one.close()

    # --- what a process does (``ApiProcessOwner``) ---

    def make_relay(self, index: int, channel: Channel[ipc_messages_and_channel.Up]) -> RequestRelay:
        """Makes the relay that runs the requests of a process."""
        assert self.engine is not None
        several = len(get_replicas(self.engine)) > 1
        full, room = channel.is_full, channel.wait_for_room
        return RequestRelay(self.engine, index, channel.write, several, self._set_vocabulary, full, room)

    def on_connected(self, process: ApiProcess) -> None:
        """Sends the current engine infos and states to a process that has just connected."""
        assert process.channel is not None
        last_state, known = self._last_states
        for i, (info, plan) in enumerate(known):
            process.channel.write(ipc_messages_and_channel.ReplicaInfo(i, info, plan))
        if last_state:
            process.channel.write(msgspec.msgpack.decode(last_state, type=ipc_messages_and_channel.EngineStates))

    def on_ready(self, process: ApiProcess, max_model_len: int) -> None:
        """Handles a process that now accepts connections."""
        if self.metrics is not None and max_model_len:
            self.metrics.start(max_model_len)
        if self._adapter_changes and process.channel is not None:
            task = asyncio.ensure_future(self._repeat_adapter_changes(process.channel))
            self._repeating.add(task)
            task.add_done_callback(self._repeating.discard)
        if all(one.ready_since is not None for one in self.processes):
            self.all_ready = True
            self.on_all_ready()

    def on_failed_start(self, process: ApiProcess, message: str, code: int) -> None:
        """Handles a process that cannot start: stops the server during start-up, logs an error later."""
        if not self.all_ready:
            process.refused = True
            self.on_failed(message, code)
        else:
            log.error("API process %d cannot start: %s", process.index, message)

    def on_ended(self, process: ApiProcess) -> None:
        """Releases what an ended process held in the shared table, and keeps its counters."""
        if not (self.all_ready or process.leaving or process.refused) and process.restarts >= MAX_START_RETRIES:
            self.on_failed_start(process, f"API process {process.index} ends again and again before it serves.", 1)
        self.table.clear_process(process.index)
        if self.metrics is not None:
            self.metrics.retire_process(process.index)

    def reset_cache(self, message: engine_messages.Resets) -> None:
        """Resets an engine's prefix cache or encoder cache."""
        assert self.engine is not None
        if isinstance(message, engine_messages.ResetPrefixCache):
            self.engine.reset_prefix_cache()
        else:
            self.engine.reset_encoder_cache()

    def _set_vocabulary(self, data: bytes) -> None:
        self._vocabulary = data

    # --- messages to processes ---

    def notify_state_change(self) -> None:
        """Pushes the engines' states to all API processes without waiting for the next interval."""
        self._state_changed.set()

    async def _push_states(self) -> None:
        while True:
            self._push_states_now()
            self._state_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATE_INTERVAL):
                    await self._state_changed.wait()

    def _push_states_now(self) -> None:
        assert self.engine is not None
        engines = get_replicas(self.engine)
        last_state, known = self._last_states
        known = known or [(None, None)] * len(engines)
        for i, engine in enumerate(engines):
            info, plan = engine.info, engine.plan
            if info is not known[i][0] or plan is not known[i][1]:
                known[i] = info, plan
                self._send_all(ipc_messages_and_channel.ReplicaInfo(i, info, plan))
        state = ipc_messages_and_channel.EngineStates(
            [get_replica_state(engine) for engine in engines], [get_counters(engine) for engine in engines]
        )
        now = msgspec.msgpack.encode(state)
        if now != last_state:
            self._send_all(state)
        self._last_states = now, known

    def _send_all(self, message: msgspec.Struct) -> None:
        for one in self.processes:
            if one.channel is not None:
                one.channel.write(message)

    # --- what processes ask ---

    async def answer(self, method: str, arguments: JsonObject) -> bytes:
        """Answers a question of an API process.

        Raises:
            TrencadisError: the requested operation raised it.
        """
        assert self.engine is not None and self.metrics is not None
        match method:
            case "metrics":
                await self._collect_metrics()
                return self.metrics.format_text()
            case "buckets":
                return self.metrics.format_buckets()
            case "sleep":
                await self._select_engine(arguments["replica"]).sleep(arguments["level"], arguments["abort"])
            case "wake":
                await self._select_engine(arguments["replica"]).wake()
            case "learn buckets":
                await self.engine.learn_buckets(arguments["force"])
            case "media":
                return await self._fetch_media(arguments)
            case "change adapters":
                await self._change_adapters(arguments)
            case "forget media":
                await asyncio.gather(*self._ask_all("forget media", arguments), return_exceptions=True)
            case _:
                raise NotFound(f"Nobody answers {method} here.")
        self._push_states_now()
        return b""

    async def _change_adapters(self, change: JsonObject) -> None:
        """Loads or unloads an adapter in all API processes; processes that start later do the same.

        Raises:
            TrencadisError: a process cannot do it.
        """
        await asyncio.gather(*self._ask_all("change adapters", change))
        self._adapter_changes[change["name"]] = change

    async def _repeat_adapter_changes(self, channel: Channel[ipc_messages_and_channel.Up]) -> None:
        """Applies earlier changes of adapters to a process that has started."""
        for change in [*self._adapter_changes.values()]:
            try:
                await channel.ask("change adapters", **{**change, "replace": True})
            except TrencadisError as error:
                log.warning("an API process that has started: %s", error)

    def _select_engine(self, replica: int) -> EngineClient:
        assert self.engine is not None
        return self.engine if replica < 0 else get_replicas(self.engine)[replica]

    def _ask_all(self, method: str, arguments: JsonObject) -> list[Coroutine[object, object, bytes]]:
        return [
            one.channel.ask(method, **arguments)
            for one in self.processes
            if one.channel is not None and one.ready_since is not None
        ]

    async def _fetch_media(self, given: JsonObject) -> bytes:
        """Returns a medium from the first process that has it; empty bytes if none has."""
        for found in await asyncio.gather(*self._ask_all("media", given), return_exceptions=True):
            if isinstance(found, bytes):
                return found
        return b""

    async def _collect_metrics(self) -> None:
        """Collects the metrics of every process that reports them in time."""
        assert self.metrics is not None

        async def one(process: ApiProcess) -> None:
            assert process.channel is not None and self.metrics is not None
            async with asyncio.timeout(METRICS_TIMEOUT):
                self.metrics.update_process(process.index, await process.channel.ask("figures"))

        up = [process for process in self.processes if process.ready_since is not None and process.channel is not None]
        await asyncio.gather(*map(one, up), return_exceptions=True)

    async def _collect_periodically(self) -> None:
        while True:
            await asyncio.sleep(METRICS_INTERVAL)
            await self._collect_metrics()


def get_replica_state(engine: EngineClient) -> ipc_messages_and_channel.ReplicaState:
    """Returns the state of one engine."""
    return ipc_messages_and_channel.ReplicaState(
        engine.phase, engine.accepting, engine.healthy, engine.ready, engine.failing,
        bool(getattr(engine, "stopping", False)), engine.restarts, engine.sleep_level, engine.sleep_operation,
        engine.progress,
    )  # fmt: skip


def get_counters(engine: EngineClient) -> engine_messages.EngineStats:
    """Returns an engine's counters, without the lists of new entries and without its plan."""
    return dataclasses.replace(
        engine.stats, step_tokens=[], buckets=[], evicted_blocks=b"", evicted_images=b"", plan=None
    )
