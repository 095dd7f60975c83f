"""Keeps an engine running: one object for the app, across engine processes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import Conflict, NotFound, Unavailable
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta, Request
from trencadis.server.engine.engine_client_and_request_timing import (
    DeltaCallback,
    MakeVocabulary,
    Pixels,
    pack_vocabulary,
)
from trencadis.server.engine.engine_process_link import STOPPED, EngineLink
from trencadis.server.engine.sleep_state import SleepState

log = logging.getLogger("trencadis.server")

MAX_BACKOFF = 30.0
STEADY_SECONDS = 60.0
END_SECONDS = 30.0
"""Seconds that an engine without requests has to exit before it is killed."""


class Supervisor:
    """An EngineClient (``server/engine/engine_client_and_request_timing.py``) that restarts its engine.

    Args:
        handle: the first engine process, already spawned.
        compile_timeout: limit in seconds of loading and of a step that compiles.
        backoff: seconds before the first restart; doubled up to 30 s, until an engine has run for a minute.
        sleep_after: seconds without a request after which the engine falls asleep; 0: never.
        max_restarts: restarts without a steady minute after which the engine counts as failing (restarts continue).
        on_fatal: called with (message, exit code) when the first start cannot succeed.
        vocabulary: returns the packed ``grammar_tokenizer_and_vocabulary.Vocabulary`` or an awaitable of it. It is
        called once, before the first request with a grammar; the result is sent to each engine. The attribute may also
        be set later.
    """

    def __init__(
        self,
        config: EngineConfig,
        handle: EngineHandle,
        *,
        compile_timeout: float = 1800.0,
        backoff: float = 1.0,
        max_restarts: int = 5,
        sleep_after: float = 0.0,
        on_fatal: Callable[[str, int], None] = lambda message, code: None,
        vocabulary: MakeVocabulary | None = None,
    ) -> None:
        self.config = config
        self.compile_timeout = compile_timeout
        self.backoff = self.delay = backoff
        self.max_restarts = max_restarts
        self.sleep_after = sleep_after
        self.sleep_state = SleepState()
        self.on_operation = self.sleep_state.on_operation
        self.sleep_task: asyncio.Task[None] | None = None
        self.on_fatal = on_fatal
        self.vocabulary = vocabulary
        self.packed_vocabulary = b""
        self.observers: list[Callable[[engine_messages.EngineStats], None]] = []
        self.on_info: list[Callable[[engine_messages.EngineInfo], None]] = []
        self.restarts = 0
        self.failures = 0
        """Number of engines that have failed since the last steady one."""
        self.ready_since: float | None = None
        """Time at which the engine began to accept requests."""
        self.last_info: engine_messages.EngineInfo | None = None
        self.leaving = False
        """True while the server still accepts requests, but tells load balancers to send no more."""
        self.draining = False
        self.stopping = False
        self.waiting = False
        self.link = self._make_link(handle)
        self.task: asyncio.Task[None] | None = None
        self.idle_task: asyncio.Task[None] | None = None

    # --- what the app reads ---

    @property
    def info(self) -> engine_messages.EngineInfo | None:
        """The last engine's report when it became ready; kept while the next one loads."""
        return self.link.info or self.last_info

    @property
    def phase(self) -> str:
        """The engine's phase, in one word."""
        if self.stopping:
            return "stopped"
        if self.draining or self.leaving:
            return "draining"
        if self.sleep_state.level:
            return self.sleep_state.phase
        if self.last_info is not None and not self.accepting:
            return "restarting"
        return self.link.phase

    @property
    def accepting(self) -> bool:
        """True if the engine would run a request submitted now, perhaps after waking up."""
        if self.sleep_state.level:
            return not self.draining
        return self.link.alive and self.link.info is not None and not self.draining and not self.waiting

    @property
    def healthy(self) -> bool:
        """True if the engine runs and is not leaving; a stalled one has been killed."""
        return self.accepting and not self.leaving

    @property
    def ready(self) -> bool:
        """True if the engine accepts requests and is as warm as ``--warmup`` requires."""
        return self.accepting and not self.leaving

    @property
    def steady(self) -> bool:
        """True if the engine has accepted requests for a minute; loading does not count."""
        return self.ready_since is not None and time.monotonic() - self.ready_since > STEADY_SECONDS

    @property
    def failing(self) -> bool:
        """True if engines fail repeatedly, so that only a restart of this process may help."""
        return self.failures > self.max_restarts and not self.steady

    @property
    def stats(self) -> engine_messages.EngineStats:
        """The last counters; ``observers`` get every message, whose lists contain only new entries."""
        return self.sleep_state.adjust_stats(self.link.stats)

    @property
    def open_requests(self) -> int:
        """Number of requests in the engine, or on their way there."""
        return len(self.link.requests) + self.link.entering + self.sleep_state.waiters

    @property
    def sleep_level(self) -> int:
        """0: awake; else the level at which the engine sleeps, until it has woken up."""
        return self.sleep_state.level

    @property
    def sleep_operation(self) -> str:
        """``sleep`` or ``wake`` while the operation runs, else empty."""
        return self.sleep_state.operation

    @property
    def plan(self) -> engine_messages.GraphPlan | None:
        """Planned shapes and their states; None if there is no plan."""
        return self.link.plan

    @property
    def progress(self) -> engine_messages.Phase | None:
        """The last phase of loading that the engine reported."""
        return None if self.sleep_state.is_asleep else self.link.progress

    def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """Submits a request and yields its deltas; closing the iterator aborts it.

        Raises:
            Unavailable: no engine accepts requests now.
        """
        if not self.accepting:
            raise Unavailable(f"The engine is not accepting requests ({self.phase}).", retry_after=5)
        return self._submit_after_wake(request, pixels) if self.sleep_state.level else self.link.submit(request, pixels)

    async def _submit_after_wake(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """Wakes the engine, then submits the request."""
        self.sleep_state.waiters += 1
        try:
            while self.sleep_state.level:
                await self.wake()
        finally:
            self.sleep_state.waiters -= 1
        async with aclosing(self.link.submit(request, pixels)) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, id: str, choice: int = -1) -> None:
        """Ends a request, or one choice of it."""
        self.link.abort(id, choice)

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """See ``EngineClient``."""
        self.link.set_delta_callback(id, callback)

    def reset_prefix_cache(self) -> None:
        """Makes all cached blocks unavailable to later requests."""
        self.link.write(engine_messages.ResetPrefixCache())

    def reset_encoder_cache(self) -> None:
        """Drops embeddings of images that no running request waits for."""
        self.link.write(engine_messages.ResetEncoderCache())

    def check_learning(self) -> None:
        """Checks that a search for shapes can begin.

        Raises:
            NotFound: this engine records no needs.
            Conflict: a search or a change runs.
        """
        learning = None if self.plan is None else self.plan.learning
        if learning is None:
            raise NotFound(
                "This engine records no needs of shapes: its device takes every size, it has pipeline stages or a "
                "draft model, or --learn-buckets off."
            )
        if learning.state != "idle" or self.link.learn_requests > learning.handled:
            raise Conflict("A search for shapes or a change of them runs.")

    async def learn_buckets(self, force: bool = False) -> None:
        """See ``EngineClient``."""
        self.check_learning()
        if self.plan is not None and self.plan.learning is not None:
            self.link.learn_requests = self.plan.learning.handled + 1
        self.link.write(engine_messages.LearnBuckets(force))

    # --- sleep ---

    async def sleep(self, level: int = 1, abort: bool = False) -> None:
        """Ends the engine's process once it has no request; returns once it has ended and all its memory is free.

        Args:
            abort: ends its requests now. Later requests wait, and wake it again.

        Raises:
            Unavailable: the engine loads, restarts or drains.
        """
        s = self.sleep_state
        while s.level and s.wake_wanted.is_set() and s.woken is not None:
            await asyncio.shield(s.woken)
        if not s.level:
            if not self.accepting or self.leaving:
                raise Unavailable(f"The engine cannot fall asleep now ({self.phase}).", retry_after=5)
            s.start_sleep(level)
            self.sleep_task = asyncio.create_task(self._finish_and_end(self.link))
        if abort:
            for id in list(self.link.requests):
                self.link.abort(id)
        await s.process_gone.wait()
        if not s.asked_to_end:
            raise Unavailable(STOPPED, retry_after=5)

    async def wake(self) -> None:
        """Starts an engine if this one sleeps; returns when it accepts requests.

        Raises:
            Unavailable: it did not start.
        """
        s = self.sleep_state
        s.request_wake()
        if s.level and s.woken is not None and not await asyncio.shield(s.woken):
            raise Unavailable(STOPPED, retry_after=5)

    async def _finish_and_end(self, link: EngineLink) -> None:
        """Waits until open requests have finished, then ends the engine process."""
        while (link.requests or link.entering) and link.alive:
            await asyncio.sleep(0.02)
        self.sleep_state.asked_to_end = link.alive
        await link.send(engine_messages.Drain())
        end = time.monotonic() + END_SECONDS
        while link.alive and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if link.alive:
            link.kill_engine(f"it did not end within {END_SECONDS:.0f} s")

    async def _watch_idle(self) -> None:
        """Puts an engine to sleep that has had no request for ``sleep_after`` seconds and has nothing left to warm
        up.
        """
        since, seen = time.monotonic(), (self.link, 0)
        while True:
            await asyncio.sleep(min(1.0, self.sleep_after / 4))
            now = (self.link, self.link.submitted)
            warming = self.link.stats.graphs.warming
            working = warming is not None and warming.fraction < 1
            if self.sleep_state.level or not self.accepting or self.open_requests or now != seen or working:
                since, seen = time.monotonic(), now
            elif time.monotonic() - since >= self.sleep_after:
                with suppress(Unavailable):
                    await self.sleep(2)

    async def _wait_until_woken(self) -> bool:
        """Waits until a wake-up is requested, then starts a new process; False if the server shuts down."""
        self.ready_since = None
        log.info("the engine sleeps: its memory is free, and a request wakes it")
        self.sleep_state.mark_asleep()
        await self.sleep_state.wake_wanted.wait()
        if self.stopping:
            return False
        log.info("the engine wakes up")
        self.sleep_state.mark_waking()
        self.link = self._make_link(self.link.handle.start_successor(self.config))
        return True

    # --- life ---

    def start(self) -> None:
        """Starts supervision; needs a running event loop."""
        self.delay = self.backoff
        self.task = asyncio.create_task(self._run())
        if self.sleep_after:
            self.idle_task = asyncio.create_task(self._watch_idle())

    def leave(self) -> None:
        """Marks the engine as draining for health checks, while requests are still accepted."""
        self.leaving = True

    def kill(self) -> None:
        """Kills the engine for good, so that open requests end with an error."""
        self.draining = self.stopping = True
        self.sleep_state.finish_wake(False)
        self.link.handle.process.kill()

    async def drain(self, timeout: float) -> None:
        """Refuses new requests and waits for the running ones, at most ``timeout`` seconds."""
        self.draining = True
        end = time.monotonic() + timeout
        while self.open_requests and (self.link.alive or self.sleep_state.level) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Ends the engine: asks it to drain if no request is open, else kills it, so that open requests end with an
        error.
        """
        self.draining = self.stopping = True
        for task in (self.idle_task, self.sleep_task):
            if task is not None:
                task.cancel()
        self.sleep_state.finish_wake(False)
        if self.open_requests or self.link.info is None or not self.link.alive:
            self.link.handle.process.kill()
        else:
            await self.link.send(engine_messages.Drain())
        if self.task is not None:
            if not self.waiting:
                await asyncio.wait([self.task], timeout=3.0)
            self.link.handle.process.kill()
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        self.link.handle.kill()

    async def _run(self) -> None:
        """Runs one engine after the other, until the server stops or a start fails for good."""
        while True:
            await self.link.run()
            if self.stopping or not await self._start_successor():
                return

    async def _start_successor(self) -> bool:
        """Starts a successor of an engine that has ended, after a back-off if it failed.

        Returns False if there will be none.
        """
        if self.steady:
            self.delay, self.failures = self.backoff, 0
        if self.sleep_state.asked_to_end and self.sleep_state.level and not self.sleep_state.process_gone.is_set():
            return await self._wait_until_woken()
        self.sleep_state.finish_wake(False)
        fatal = self.link.fatal
        if fatal is not None and self.last_info is None and not fatal.capture:
            self.on_fatal(fatal.message, fatal.code)
            return False
        self.ready_since = None
        self.failures += 1
        why = self.link.reason or f"exit code {self.link.handle.process.returncode}"
        log.error("the engine stopped (%s); restart in %g s", why, self.delay)
        self.restarts += 1
        if self.failures == self.max_restarts + 1:
            log.error("%d restarts without a steady minute (--max-engine-restarts): /live says 503", self.failures - 1)
        self._skip_capture()
        self.waiting = True
        await asyncio.sleep(self.delay)
        self.delay = min(2 * self.delay, MAX_BACKOFF)
        if self.stopping or self.draining:
            return False
        self.link = self._make_link(self.link.handle.start_successor(self.config))
        self.waiting = False
        return True

    def _skip_capture(self) -> None:
        """Excludes the bucket in whose capture an engine or a rank crashed; not if this process killed the engine."""
        fatal = self.link.fatal
        bucket = fatal.capture if fatal is not None else "" if self.link.reason else self.link.capturing
        if bucket and bucket not in self.config.skip_captures:
            log.error("the engine crashed during the capture of %s: this bucket stays without a graph", bucket)
            self.config = dataclasses.replace(self.config, skip_captures=[*self.config.skip_captures, bucket])

    def _make_link(self, handle: EngineHandle) -> EngineLink:
        return EngineLink(handle, self.compile_timeout, self._on_stats, self._on_engine_ready, self._get_vocabulary)

    async def _get_vocabulary(self) -> bytes:
        """Returns the packed vocabulary, made at the first call.

        Raises:
            Unavailable: this server has none.
        """
        if not self.packed_vocabulary:
            self.packed_vocabulary = await pack_vocabulary(self.vocabulary)
        return self.packed_vocabulary

    def _on_stats(self, stats: engine_messages.EngineStats) -> None:
        for observer in self.observers:
            observer(stats)

    def _on_engine_ready(self, info: engine_messages.EngineInfo) -> None:
        self.last_info, self.ready_since = info, time.monotonic()
        self.sleep_state.finish_wake(True)
        for listener in self.on_info:
            listener(info)
