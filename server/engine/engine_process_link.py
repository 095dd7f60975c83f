"""Requests that are open at another process, and the connection to one engine process.

A ``RequestLink`` has the deltas of open requests, their pixels on demand, and the vocabulary before a grammar. Each of
several API processes uses one towards the process that has the engine (``server/processes/remote_engine.py``). An
``EngineLink`` is the asyncio side of an engine's process: it adds frames and pings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from trencadis.core.errors import QueueFull, Unavailable
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.process import engine_messages
from trencadis.core.process.child_process_environment_and_exit import StopWatch
from trencadis.core.request import Delta, Request
from trencadis.server.engine.engine_client_and_request_timing import (
    BACKLOG,
    SMALL_BACKLOG,
    Backlog,
    DeltaCallback,
    MakeVocabulary,
    Pixels,
    estimate_size,
    format_plan_lines,
    pack_vocabulary,
)


class OpenRequest:
    """One open request.

    A delta waits for its reader, which is a task: waking it takes longer than handling a token. So a reader may
    register a ``callback``, which is called at once instead while the reader waits and nothing is queued. The order is
    kept, since a reader waits only once it has handled all earlier deltas.

    Args:
        choices: its number of choices.
        backlog: bounds what waits for the reader.
    """

    __slots__ = ("_backlog", "_choices", "_counted", "_deltas", "_held", "_reader", "callback", "pixels", "unfinished")

    def __init__(self, pixels: Sequence[Pixels], choices: int, backlog: Backlog = BACKLOG) -> None:
        self.pixels = pixels
        self._backlog, self._choices, self._held, self._counted = backlog, choices, 0, 0
        self.unfinished = set(range(choices))
        self.callback: DeltaCallback | None = None
        self._deltas: deque[Delta | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Future that the waiting reader awaits."""

    def deliver(self, delta: Delta) -> bool:
        """Delivers a delta: to the callback if the reader is idle, else to the reader's queue.

        The last delta of a choice is always queued. Returns False if more waits than is allowed: then the reader gets
        an error, and deliver nothing more.
        """
        reader = self._reader
        if self.callback is None or delta.finish is not None or reader is None or reader.done():
            return self._put(delta)
        try:
            taken = self.callback(delta)
        except Exception as error:
            # An error in one stream must not end the task that delivers the deltas of all streams.
            self.callback = None
            self._wake(error)
            return True
        return taken or self._put(delta)

    def _put(self, delta: Delta) -> bool:
        """Queues a delta for the reader; returns False if too much waits."""
        self._held += estimate_size(delta)
        if self._held > SMALL_BACKLOG * self._choices and len(self._deltas) > 2 * self._choices:
            self._count(self._held)
            if not self._backlog.fits(self._held):
                slow = QueueFull(f"The answer is read too slowly: {self._held} bytes of it wait.", retry_after=1)
                self.drop()
                self._wake(slow)
                return False
        self._wake(delta)
        return True

    def _count(self, size: int) -> None:
        """Counts that ``size`` bytes wait."""
        self._backlog.held += size - self._counted
        self._counted = size

    def drop(self) -> None:
        """Drops what waits."""
        self._deltas.clear()
        self._count(0)
        self._held = 0

    def _wake(self, item: Delta | Exception) -> None:
        self._deltas.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next_delta(self) -> Delta:
        """Returns the next delta for the reader; called by one task only.

        Raises:
            Exception: the callback raised it.
        """
        while not self._deltas:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._deltas.popleft()
        if isinstance(item, Exception):
            raise item
        self._held -= estimate_size(item)
        if self._counted:
            self._count(self._held)
        return item


log = logging.getLogger("trencadis.server")

STOPPED = "The engine stopped; please retry."
DELIVERY_SLICE = 0.001
"""Seconds for which a step's deltas are delivered before the event loop continues with other tasks: each may be
written to its client at once, which takes some twenty microseconds.
"""
CLOCK_INTERVAL = 16
"""Number of deltas between two reads of the clock."""


class RemotePixels(Sequence[Pixels]):
    """Placeholder for the pixels of a request that another process holds.

    Args:
        media: number of media.
        need: called with the link and the index of a medium whose pixels it needs.
    """

    def __init__(self, media: int, need: Callable[[RequestLink, int], None]) -> None:
        self.num_media, self.on_need = media, need

    def __len__(self) -> int:
        return self.num_media

    def __getitem__(self, index: Any) -> Any:
        raise IndexError("the pixels are in another process")


class RequestLink:
    """The requests that this process has open at another process.

    Args:
        vocabulary: returns the packed ``grammar_tokenizer_and_vocabulary.Vocabulary``; called once, before the first
        request with a grammar is sent.
    """

    def __init__(self, vocabulary: MakeVocabulary | None = None) -> None:
        self.vocabulary = vocabulary
        self.vocabulary_sent: asyncio.Task[None] | None = None
        self.requests: dict[str, OpenRequest] = {}
        self.entering = 0
        """Number of requests that wait for something before they are sent to the engine."""
        self.submitted = 0
        """Number of requests submitted so far."""
        self.wanted_media: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.writer: asyncio.StreamWriter | None = None
        self.alive = True

    def fail_all(self) -> None:
        """Ends every unfinished choice with an error, because the engine has ended."""
        for id, entry in self.requests.items():
            for choice in sorted(entry.unfinished):
                entry.deliver(Delta(id, choice, finish="error", status=503, message=STOPPED))
        self.requests.clear()

    def deliver(self, delta: Delta) -> None:
        """Delivers a delta to its request; ignored if the request or the choice has ended."""
        entry = self.requests.get(delta.id)
        if entry is None or delta.choice not in entry.unfinished:
            return
        if not entry.deliver(delta):
            log.warning("request %s: its answer is read too slowly, and is ended", delta.id)
            del self.requests[delta.id]
            self.write(engine_messages.Abort([delta.id]))
            return
        if delta.finish is not None:
            entry.unfinished.discard(delta.choice)
            if not entry.unfinished:
                del self.requests[delta.id]

    async def deliver_all(self, deltas: Sequence[Delta]) -> None:
        """Delivers the deltas of a step, yielding to the event loop every millisecond."""
        end = time.monotonic() + DELIVERY_SLICE
        for i in range(0, len(deltas), CLOCK_INTERVAL):
            if i and time.monotonic() > end:
                await asyncio.sleep(0)
                end = time.monotonic() + DELIVERY_SLICE
            for delta in deltas[i : i + CLOCK_INTERVAL]:
                self.deliver(delta)

    # --- requests ---

    def set_delta_callback(self, id: str, callback: DeltaCallback) -> None:
        """See ``EngineClient``."""
        entry = self.requests.get(id)
        if entry is not None:
            entry.callback = callback

    async def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """Submits a request; yields deltas until every choice has finished. Closing the iterator aborts the rest."""
        if not self.alive or self.writer is None:
            raise Unavailable(STOPPED, retry_after=5)
        self.submitted += 1
        if request.rule is not None and request.rule.grammar:
            await self.enter_with_vocabulary()
        entry = OpenRequest(pixels, request.params.n)
        self.requests[request.id] = entry
        try:
            await self.send(engine_messages.Add(request))
            left = len(entry.unfinished)
            while left:
                delta = await entry.next_delta()
                left -= delta.finish is not None
                yield delta
        finally:
            entry.drop()
            if self.requests.pop(request.id, None) is not None:
                self.write(engine_messages.Abort([request.id]))

    def abort(self, id: str, choice: int = -1) -> None:
        """Aborts one choice (or all of them): its stream ends with ``finish="abort"``."""
        entry = self.requests.get(id)
        if entry is None:
            return
        chosen = sorted(entry.unfinished) if choice < 0 else [choice] if choice in entry.unfinished else []
        if chosen:
            self.write(engine_messages.Abort([id], choice))
        for one in chosen:
            self.deliver(Delta(id, one, finish="abort"))

    async def enter_with_vocabulary(self) -> None:
        """Sends the grammar vocabulary if needed; the waiting request counts as open."""
        self.entering += 1
        try:
            await self.send_vocabulary()
        finally:
            self.entering -= 1
        if not self.alive:
            raise Unavailable(STOPPED, retry_after=5)

    async def send_vocabulary(self) -> None:
        """Sends the vocabulary of grammars, once: all requests that need it wait for the same task; a failed one is
        repeated.
        """
        task = self.vocabulary_sent
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self.vocabulary_sent = asyncio.create_task(self._send_vocabulary())
        await asyncio.shield(task)

    async def _send_vocabulary(self) -> None:
        data = memoryview(await pack_vocabulary(self.vocabulary))
        for offset in range(0, len(data), engine_messages.CHUNK):
            await self.send(
                engine_messages.VocabularyPart(offset, len(data)), data[offset : offset + engine_messages.CHUNK]
            )

    def request_media(self, id: str, index: int) -> None:
        """Handles a request of the other process for the pixels of medium ``index``."""
        entry = self.requests.get(id)
        if entry is not None and isinstance(entry.pixels, RemotePixels):
            entry.pixels.on_need(self, index)
        else:
            self.wanted_media.put_nowait((id, index))

    async def send_media(self) -> None:
        """Sends the pixels that the engine requests, item by item, in chunks between which other frames can be sent."""
        while True:
            id, index = await self.wanted_media.get()
            entry = self.requests.get(id)
            if entry is None:
                continue
            if index >= len(entry.pixels):
                await self.send(engine_messages.MediaFailed(id, index, 500, "The image is no longer available."))
                continue
            data = np.ascontiguousarray(entry.pixels[index]).reshape(-1).data
            for offset in range(0, len(data), engine_messages.CHUNK):
                if id not in self.requests:
                    break
                chunk = data[offset : offset + engine_messages.CHUNK]
                await self.send(engine_messages.Media(id, index, offset, len(data)), chunk)

    # --- frames to the engine ---

    def write(self, message: engine_messages.Down, payload: bytes | memoryview = b"") -> None:
        """Writes one frame; does nothing if the socket is closed."""
        if self.writer is None or self.writer.is_closing():
            return
        self.writer.write(engine_messages.frame(message, payload))
        if payload:
            self.writer.write(payload)

    async def send(self, message: engine_messages.Down, payload: bytes | memoryview = b"") -> None:
        """Writes one frame and waits while the socket is full. ``run`` handles a broken socket."""
        self.write(message, payload)
        if self.writer is not None:
            try:
                await self.writer.drain()
            except OSError:
                log.debug("the engine's socket broke while a frame was sent")


PING_INTERVAL = 1.0
MISSED_PONGS = 10
STALL_SECONDS = 60.0
STALL_FACTOR = 20.0
SLOW_PHASES = ("compiling", "capturing", "validating")


class EngineLink(RequestLink):
    """The connection to one engine process until it ends.

    Args:
        compile_timeout: limit in seconds of loading and of a step that compiles.
        on_stats: called with every message of counters.
        on_info: called once, when the engine accepts requests.
        vocabulary: see ``RequestLink``.
    """

    def __init__(
        self,
        handle: EngineHandle,
        compile_timeout: float = 1800.0,
        on_stats: Callable[[engine_messages.EngineStats], None] = lambda stats: None,
        on_info: Callable[[engine_messages.EngineInfo], None] = lambda info: None,
        vocabulary: MakeVocabulary | None = None,
    ) -> None:
        super().__init__(vocabulary)
        self.handle = handle
        self.compile_timeout = compile_timeout
        self.on_stats = on_stats
        self.on_info = on_info
        self.info: engine_messages.EngineInfo | None = None
        self.stats = engine_messages.EngineStats()
        self.phase = "starting"
        self.progress: engine_messages.Phase | None = None
        self.plan: engine_messages.GraphPlan | None = None
        self.capturing = ""  # the bucket that is being captured
        self.learn_requests = 0  # requests to learn shapes that were sent to this engine
        self.fatal: engine_messages.Fatal | None = None
        self.reason = ""
        self.pinged = self.ponged = 0
        self.born = time.monotonic()

    # --- life ---

    async def run(self) -> None:
        """Reads until the process has ended; then ends every open request with an error."""
        reader, self.writer = await asyncio.open_connection(sock=self.handle.sock)
        helpers = [asyncio.create_task(self.send_media()), asyncio.create_task(self.watch())]
        try:
            while True:
                size, _ = engine_messages.HEADER.unpack(await reader.readexactly(engine_messages.HEADER.size))
                await self.receive(engine_messages.decode_up(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await self.close(helpers)

    async def close(self, helpers: Sequence[asyncio.Task[None]]) -> None:
        """Ends all requests; gives the process half a second to exit with its own code, then kills and reaps it."""
        self.alive = False
        self.fail_all()
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        if self.writer is not None:
            self.writer.transport.abort()
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()
        for _ in range(50):
            if self.handle.process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        self.handle.kill()

    def kill_engine(self, reason: str) -> None:
        """Kills the process, so that ``run`` ends with ``reason``."""
        self.reason = reason
        log.error("engine killed: %s", reason)
        self.handle.process.kill()

    # --- frames from the engine ---

    async def receive(self, message: engine_messages.Up) -> None:
        """Handles one frame."""
        match message:
            case engine_messages.Deltas(items, stats):
                await self.deliver_all(items)
                if stats is not None:
                    self.plan, self.stats = stats.plan or self.plan, stats
                    self.on_stats(stats)
            case engine_messages.NeedMedia(id, index):
                self.request_media(id, index)
            case engine_messages.Pong():
                self.check_step(message)
            case _:
                self.on_start_progress(message)

    def on_start_progress(
        self, message: engine_messages.Phase | engine_messages.Capture | engine_messages.Ready | engine_messages.Fatal
    ) -> None:
        """Handles a frame about the progress of the start or the warm-up."""
        match message:
            case engine_messages.Phase():
                self.phase, self.progress = message.name, message
                how_far = f" {message.fraction:.0%}" if message.fraction else ""
                detail = f" {message.detail}" if message.detail else ""
                log.info("engine: %s%s%s (%.1f s)", message.name, detail, how_far, message.seconds)
            case engine_messages.Capture(bucket, begun):
                self.capturing = bucket if begun else ""
            case engine_messages.Ready(info):
                self.info, self.phase, self.plan = info, "idle", info.graphs
                log_engine_info(info)
                self.on_info(info)
            case engine_messages.Fatal():
                self.fatal, self.reason = message, message.message

    def check_step(self, pong: engine_messages.Pong) -> None:
        """Records an answer to a ping; kills an engine whose step takes far too long; compiling has a limit of its
        own.
        """
        self.ponged = max(self.ponged, pong.n)
        self.phase = pong.phase
        limit = self.compile_timeout
        if self.info is not None and pong.phase not in SLOW_PHASES:
            limit = max(STALL_SECONDS, STALL_FACTOR * self.info.step_seconds)
        if pong.seconds > limit:
            self.kill_engine(f"{pong.phase}, step {pong.step}: {pong.seconds:.0f} s, limit {limit:.0f} s")

    # --- whether it lives ---

    async def watch(self) -> None:
        """Pings the engine. Counts unanswered pings, not seconds, so a blocked event loop here does not kill a healthy
        engine.

        While the engine loads, imports may block its reader thread, so only the time limit of loading applies. One that
        is stopped is killed at any time.
        """
        stops = StopWatch(self.handle.process)
        while True:
            if stops.look():
                self.kill_engine("no sign of life: its process is stopped")
            elif self.info is None:
                self.watch_start()
            elif self.pinged - self.ponged >= MISSED_PONGS:
                self.kill_engine(f"no sign of life for {self.pinged - self.ponged} s")
            self.pinged += 1
            self.write(engine_messages.Ping(self.pinged))
            await asyncio.sleep(PING_INTERVAL)

    def watch_start(self) -> None:
        """Kills an engine that takes too long to start; until then, unanswered pings do not count."""
        if time.monotonic() - self.born > self.compile_timeout:
            self.kill_engine(f"not ready after {self.compile_timeout:.0f} s")
        self.ponged = self.pinged


def log_engine_info(info: engine_messages.EngineInfo) -> None:
    """Logs the lines that start-up scripts look for."""
    tokens = info.num_blocks * info.block_size
    log.info("engine ready on %s, %s, after %.1f s", info.device, info.dtype, info.seconds)
    log.info("KV cache size: %s tokens", f"{tokens:,}")
    # In vLLM's words on every device; scripts parse the numbers.
    log.info("GPU KV cache size: %s tokens", f"{tokens:,}")
    log.info("# GPU blocks: %d, # CPU blocks: %d", info.num_blocks, info.host_blocks)
    if info.max_model_len:
        log.info(
            "Maximum concurrency for %s tokens per request: %.2fx",
            f"{info.max_model_len:,}",
            tokens / info.max_model_len,
        )
    for note in info.notes:
        log.info("engine: %s", note)
    if info.graphs is not None:
        for line in format_plan_lines(info.graphs):
            log.info("%s", line)
