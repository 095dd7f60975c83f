"""Several engines as one ``EngineClient``: a router sends each request to one, and to another if that one dies.

The router's view of a request: keys of the prefixes of its prompt, and of its images.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

from trencadis.core.checkpoint.pooling_description import LAST
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BadRequest, Unavailable
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.kv.block_pool import SIZE, BlockHashChain, image_key
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta, Request
from trencadis.server.engine.engine_client_and_request_timing import (
    DeltaCallback,
    MakeVocabulary,
    Pixels,
    pack_vocabulary,
)
from trencadis.server.engine.engine_process_link import STOPPED
from trencadis.server.engine.supervisor import Supervisor
from trencadis.server.processes.combined_engine_state import EngineGroup
from trencadis.server.processes.replica_router import PrefixAffinityRouter
from trencadis.server.processes.replica_wait_prediction import (
    Assignment,
    Key,
    ReplicaCosts,
    RequestCost,
    RoutedImage,
    RoutedPrefix,
    StepCosts,
    is_indexed_prefix,
)

PREFIX_STEP = 128
"""Tokens between two prefixes of a prompt that have keys; one block, if that is larger."""


ADAPTER_SLOTS = 512
"""Slots of an image whose encoding is about as dear as reading an adapter, by which engines that hold it win ties."""


def read_key(data: bytes) -> Key:
    """Returns the key in 8 bytes."""
    return int.from_bytes(data[:SIZE], "little")


def read_keys(data: bytes) -> array[int]:
    """Returns the keys of an eviction log."""
    found = array("Q")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def make_request_cost(request: Request, block: int) -> RequestCost:
    """Computes the routing cost of a request; prefix keys are left out while the block size is unknown (0)."""
    count = len(request.tokens)
    images = [RoutedImage(read_key(image_key(request.key_of(s))), s.slots, s.offset + s.length) for s in request.spans]
    if request.adapter is not None:
        images.insert(0, RoutedImage(int(request.adapter.digest[: 2 * SIZE], 16), ADAPTER_SLOTS, count + 1))
    output = request.params.max_tokens or 0
    whole = request.params.prompt_logprobs is not None or request.params.skip_reading_prefix_cache
    if not block or whole or request.pool not in ("", LAST):
        return RequestCost(count, (), images, output)
    chain = BlockHashChain(request, block)
    limit = (count - 1) // block
    chain.extend(request.tokens, limit * block)
    unit = max(PREFIX_STEP // block, 1)
    prefixes = [
        RoutedPrefix(read_key(chain.keys[i - 1]), i * block)
        for i in range(unit, limit + 1, unit)
        if is_indexed_prefix(i // unit)
    ]
    return RequestCost(count, prefixes, images, output)


log = logging.getLogger("trencadis.server")

MAX_ENGINE_DEATHS = 2
"""Maximum engines that may die during a request; it is not retried after that."""

WAKE_WAIT = 1.0
"""Seconds of work queued before a request from which a sleeping engine is woken instead."""

COST_STAGES = {"prefill": "prefill", "fresh": "prefill", "context": "prefill", "vision": "vision", "decode": "decode"}
"""Stage of a launch -> the cost that the router learns from it."""


class Fleet(EngineGroup[Supervisor]):
    """An EngineClient (``server/engine/engine_client_and_request_timing.py``) over several Supervisors.

    Args:
        configs: configuration of each engine, from ``divide_resources``.
        handles: their processes, already spawned.
        compile_timeout, backoff, max_restarts, sleep_after: for each engine, see ``Supervisor``.
        seed: seed of the router's random choices.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        handles: Sequence[EngineHandle],
        *,
        compile_timeout: float = 1800.0,
        backoff: float = 1.0,
        max_restarts: int = 5,
        sleep_after: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.config = configs[0]
        self.on_fatal: Callable[[str, int], None] = lambda message, code: None
        self.vocabulary: MakeVocabulary | None = None
        self.observers: list[Callable[[engine_messages.EngineStats], None]] = []
        self.on_info: list[Callable[[engine_messages.EngineInfo], None]] = []
        self.on_operation: list[Callable[[str, float], None]] = []
        self.task: asyncio.Task[None] | None = None
        self.retries = 0
        """Number of requests that were sent to another engine because theirs died."""
        self.engines = [
            Supervisor(
                config, handle, compile_timeout=compile_timeout, backoff=backoff, max_restarts=max_restarts,
                sleep_after=sleep_after, on_fatal=lambda m, c: self.on_fatal(m, c), vocabulary=self._get_vocabulary,
            )
            for config, handle in zip(configs, handles, strict=True)
        ]  # fmt: skip
        self.costs = ReplicaCosts(len(configs), configs[0].max_num_batched_tokens or StepCosts().chunk)
        self.router = PrefixAffinityRouter(
            len(configs), self.costs.each.__getitem__, configs[0].max_num_seqs or 128, seed=seed
        )
        self._vocabulary_task: asyncio.Task[bytes] | None = None
        self._replica_of: dict[str, int] = {}
        self._waking: set[asyncio.Task[None]] = set()
        for i, engine in enumerate(self.engines):
            engine.observers.append(partial(self._on_stats, i))
            engine.on_info.append(partial(self._on_engine_ready, i))
            engine.on_operation.append(self._notify_operation)

    # --- requests ---

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncIterator[Delta]:
        """Submits a request and yields its deltas; closing the iterator aborts it.

        ``request.replica`` pins it to an engine; afterwards it is the engine that got the request.

        Raises:
            BadRequest: it is pinned to an engine that does not exist.
            Unavailable: no engine accepts requests now.
        """
        if request.replica >= len(self.engines):
            raise BadRequest(f"There are engines 0 to {len(self.engines) - 1}, and no {request.replica}.")
        if not self.accepting:
            raise Unavailable(f"No engine is accepting requests ({self.phase}).", retry_after=5)
        return self._retry_engines(request, pixels)

    async def _retry_engines(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """Submits to one engine after another until the first delta arrives, then streams from that engine."""
        info = next((e.info for e in self.engines if e.info is not None), None)
        cost = make_request_cost(request, 0 if info is None else info.block_size)
        pinned, avoid, deaths = request.replica, set[int](), 0
        last = Unavailable(f"No engine takes requests ({self.phase}).", retry_after=5)
        while True:
            ticket = self._choose_engine(cost, avoid, pinned)
            if ticket is None:
                raise last
            request.replica = self._replica_of[request.id] = ticket.replica
            log.debug("route: request %s goes to engine %d, not to %s", request.id, ticket.replica, avoid or "none")
            try:
                async with aclosing(self._try_engine(request, pixels, ticket)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except _RequestNotStarted as error:
                deaths, last = deaths + error.died, error.why
                avoid.add(ticket.replica)
                if deaths >= MAX_ENGINE_DEATHS:
                    raise last from None
                self.retries += error.died
                log.debug("retry: request %s, after %d engines died under it", request.id, deaths)
                log.info("request %s leaves engine %d: %s", request.id, ticket.replica, last)
            finally:
                self._replica_of.pop(request.id, None)

    async def _try_engine(
        self, request: Request, pixels: Sequence[Pixels], ticket: Assignment
    ) -> AsyncGenerator[Delta]:
        """Yields the deltas of one engine.

        Raises:
            _RequestNotStarted: there was none, and another engine may be tried.
        """
        sent = False
        try:
            async with aclosing(_stream_deltas(self.engines[ticket.replica], request, pixels)) as deltas:
                async for delta in deltas:
                    if not sent and delta.status == 503 and delta.message == STOPPED:
                        raise _RequestNotStarted(Unavailable(STOPPED, retry_after=5), died=True)
                    if not sent:
                        self.router.on_first_token(ticket, time.monotonic())
                        sent = True
                    yield delta
        finally:
            self.router.on_ended(ticket, time.monotonic())

    def _choose_engine(self, cost: RequestCost, avoid: set[int], pinned: int) -> Assignment | None:
        """Chooses and charges the engine of a request; a sleeping one is chosen if none is awake."""
        now, asleep = time.monotonic(), list[int]()
        for i, engine in enumerate(self.engines):
            if engine.accepting and not engine.sleep_level:
                self.router.open(i)
            else:
                self.router.close(i)
                if engine.accepting and i not in avoid and pinned in (-1, i):
                    asleep.append(i)
        ticket = self.router.choose(cost, now, avoid, pinned)
        if not asleep:
            return ticket
        if ticket is None:
            return self.router.assign(asleep[0], cost, now)
        if self.router.loads[ticket.replica].queued - ticket.seconds > WAKE_WAIT:
            task = asyncio.create_task(_wake_engine(self.engines[asleep[0]]))
            self._waking.add(task)
            task.add_done_callback(self._waking.discard)
        return ticket

    def abort(self, id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it."""
        at = self._replica_of.get(id)
        if at is not None:
            self.engines[at].abort(id, choice)

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """See ``EngineClient``."""
        at = self._replica_of.get(id)
        if at is not None:
            self.engines[at].set_delta_callback(id, callback)

    def reset_prefix_cache(self) -> None:
        """Makes all cached blocks unavailable to later requests."""
        for i, engine in enumerate(self.engines):
            engine.reset_prefix_cache()
            self.router.prefixes.forget(i)

    def reset_encoder_cache(self) -> None:
        """Drops embeddings of images that no running request waits for."""
        for i, engine in enumerate(self.engines):
            engine.reset_encoder_cache()
            self.router.images.forget(i)

    async def learn_buckets(self, force: bool = False) -> None:
        """Starts a search in every engine, or in none if one of them cannot begin; see ``EngineClient``."""
        for engine in self.engines:
            engine.check_learning()
        for engine in self.engines:
            await engine.learn_buckets(force)

    # --- sleep ---

    async def sleep(self, level: int = 1, abort: bool = False) -> None:
        """Ends the processes of all engines once they have no requests (``abort``: now).

        Raises:
            Unavailable: an engine loads, restarts or drains.
        """
        await _wait_all([e.sleep(level, abort) for e in self.engines])

    async def wake(self) -> None:
        """Starts the engines that sleep; returns when they accept requests.

        Raises:
            Unavailable: one did not start.
        """
        await _wait_all([e.wake() for e in self.engines])

    # --- life ---

    def start(self) -> None:
        """Starts supervision; needs a running event loop."""
        for engine in self.engines:
            engine.start()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Runs until no engine is supervised any more; ends at once if a supervision fails."""
        await asyncio.gather(*(e.task for e in self.engines if e.task is not None))

    def leave(self) -> None:
        """Still accepts requests, but tells load balancers to send no more."""
        for engine in self.engines:
            engine.leave()

    async def drain(self, timeout: float) -> None:
        """Refuses new requests and waits for the running ones, at most ``timeout`` seconds."""
        await asyncio.gather(*(e.drain(timeout) for e in self.engines))

    def kill(self) -> None:
        """Kills every engine, so that open requests end with an error."""
        for engine in self.engines:
            engine.kill()

    async def stop(self) -> None:
        """Ends every engine."""
        for task in self._waking:
            task.cancel()
        await asyncio.gather(*(e.stop() for e in self.engines))
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def _get_vocabulary(self) -> bytes:
        """Returns the packed vocabulary, made once for all engines."""
        if self._vocabulary_task is None or (self._vocabulary_task.done() and self._vocabulary_task.exception()):
            self._vocabulary_task = asyncio.create_task(pack_vocabulary(self.vocabulary))
        return await asyncio.shield(self._vocabulary_task)

    def _notify_operation(self, operation: str, seconds: float) -> None:
        for listener in self.on_operation:
            listener(operation, seconds)

    def _on_engine_ready(self, at: int, info: engine_messages.EngineInfo) -> None:
        """Resets the router's state of an engine that (re)started.

        Calls the listeners once all engines are up.
        """
        self.router.on_engine_lost(at)
        self.router.loads[at].set_capacity(info.num_blocks * info.block_size)
        together = self.info
        if together is not None and all(e.info is not None for e in self.engines):
            for listener in self.on_info:
                listener(together)

    def _on_stats(self, at: int, stats: engine_messages.EngineStats) -> None:
        """Updates the router's step costs and its record of cached keys from an engine's counters."""
        for use in stats.buckets:
            stage = COST_STAGES.get(use.stage)
            if stage is not None:
                self.costs.learn(at, stage, use.needed or use.real, use.seconds)
        if stats.evicted_blocks or stats.evicted_images:
            self.router.on_evicted(at, read_keys(stats.evicted_blocks), read_keys(stats.evicted_images))
        for observer in self.observers:
            observer(stats)


class _RequestNotStarted(Exception):
    """An engine did not take a request, or ``died`` before the first delta."""

    def __init__(self, why: Unavailable, died: bool = False) -> None:
        super().__init__(str(why))
        self.why, self.died = why, died


async def _stream_deltas(engine: Supervisor, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
    """Yields the deltas of ``engine``.

    Raises:
        _RequestNotStarted: it did not take the request.
    """
    begun = False
    try:
        async with aclosing(engine.submit(request, pixels)) as deltas:
            async for delta in deltas:
                begun = True
                yield delta
    except Unavailable as error:
        if begun:
            raise
        raise _RequestNotStarted(error) from None


async def _wait_all(waits: Sequence[Awaitable[None]]) -> None:
    """Waits for all; then raises the first error."""
    for result in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _wake_engine(engine: Supervisor) -> None:
    try:
        await engine.wake()
    except Unavailable as error:
        log.warning("an engine did not wake up: %s", error)
