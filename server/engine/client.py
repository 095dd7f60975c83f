"""The asyncio side of one engine process: frames, open requests, pixels on demand, pings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trencadis.core.errors import Unavailable
from trencadis.core.process import wire
from trencadis.core.request import Delta, Request
from trencadis.server.engine import graph_report
from trencadis.server.engine.protocol import Pixels
from trencadis.server.engine.spawn import EngineHandle, spawn

__all__ = ["EngineHandle", "EngineLink", "spawn"]

log = logging.getLogger("trencadis.server")

STOPPED = "The engine stopped; please retry."
PING_EVERY = 1.0
MISSED_PONGS = 10
STALL_SECONDS = 60.0
STALL_FACTOR = 20.0
SLOW_PHASES = ("compiling", "capturing", "validating")


@dataclass(slots=True)
class OpenRequest:
    """An open request: the queue of its deltas, its pixels, its unfinished choices."""

    deltas: asyncio.Queue[Delta]
    pixels: Sequence[Pixels]
    left: set[int] = field(default_factory=set)


class EngineLink:
    """Talks to one engine process until it is gone.

    Args:
        compile_timeout: limit in seconds of loading and of a step that compiles.
        on_stats: called with every message of counters.
        on_info: called once, when the engine accepts requests.
        vocabulary: gives the packed ``core.masks.vocabulary.Vocabulary``; called once, before the first request whose
            rule has a grammar is sent.
    """

    def __init__(
        self,
        handle: EngineHandle,
        compile_timeout: float = 1800.0,
        on_stats: Callable[[wire.EngineStats], None] = lambda stats: None,
        on_info: Callable[[wire.EngineInfo], None] = lambda info: None,
        vocabulary: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self.handle = handle
        self.compile_timeout = compile_timeout
        self.on_stats = on_stats
        self.on_info = on_info
        self.vocabulary = vocabulary
        self.vocabulary_sent: asyncio.Task[None] | None = None
        self.info: wire.EngineInfo | None = None
        self.stats = wire.EngineStats()
        self.phase = "starting"
        self.progress: wire.Phase | None = None
        self.plan: wire.GraphPlan | None = None
        self.capturing = ""
        """The bucket that is being captured."""
        self.fatal: wire.Fatal | None = None
        self.reason = ""
        self.requests: dict[str, OpenRequest] = {}
        self.entering = 0
        """Requests that wait for something before they are in the engine."""
        self.submitted = 0
        """Requests that came so far."""
        self.wanted: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.pinged = self.ponged = 0
        self.born = time.monotonic()
        self.writer: asyncio.StreamWriter | None = None
        self.alive = True

    # --- life ---

    async def run(self) -> None:
        """Reads until the process has ended; then ends every open request with an error."""
        reader, self.writer = await asyncio.open_connection(sock=self.handle.sock)
        helpers = [asyncio.create_task(self.feed()), asyncio.create_task(self.watch())]
        try:
            while True:
                size, _ = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))
                self.receive(wire.decode_up(await reader.readexactly(size)))
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

    def fail_all(self) -> None:
        """Ends every unfinished choice with an error, because the engine has ended."""
        for id, entry in self.requests.items():
            for choice in sorted(entry.left):
                entry.deltas.put_nowait(Delta(id, choice, finish="error", status=503, message=STOPPED))
        self.requests.clear()

    def give_up(self, reason: str) -> None:
        """Kills the process; ``run`` then ends as after any other end of it."""
        self.reason = reason
        log.error("engine killed: %s", reason)
        self.handle.process.kill()

    # --- frames from the engine ---

    def receive(self, message: wire.Up) -> None:
        """Handles one frame."""
        match message:
            case wire.Deltas(items, stats):
                for delta in items:
                    self.deliver(delta)
                if stats is not None:
                    self.plan, self.stats = stats.plan or self.plan, stats
                    self.on_stats(stats)
            case wire.NeedMedia(id, index):
                self.wanted.put_nowait((id, index))
            case wire.Pong():
                self.ponged = max(self.ponged, message.n)
                self.phase = message.phase
                self.check_step(message)
            case _:
                self.starting(message)

    def starting(self, message: wire.Phase | wire.Capture | wire.Ready | wire.Fatal) -> None:
        """Handles a frame that tells how far the start is, or the warm-up."""
        match message:
            case wire.Phase():
                self.phase, self.progress = message.name, message
                how_far = f" {message.fraction:.0%}" if message.fraction else ""
                detail = f" {message.detail}" if message.detail else ""
                log.info("engine: %s%s%s (%.1f s)", message.name, detail, how_far, message.seconds)
            case wire.Capture(bucket, begun):
                self.capturing = bucket if begun else ""
            case wire.Ready(info):
                self.info, self.phase, self.plan = info, "idle", info.graphs
                announce(info)
                self.on_info(info)
            case wire.Fatal():
                self.fatal, self.reason = message, message.message

    def deliver(self, delta: Delta) -> None:
        entry = self.requests.get(delta.id)
        if entry is None or delta.choice not in entry.left:
            return
        entry.deltas.put_nowait(delta)
        if delta.finish is not None:
            entry.left.discard(delta.choice)
            if not entry.left:
                del self.requests[delta.id]

    def check_step(self, pong: wire.Pong) -> None:
        """Kills an engine whose step runs far too long; compiling has a limit of its own."""
        limit = self.compile_timeout
        if self.info is not None and pong.phase not in SLOW_PHASES:
            limit = max(STALL_SECONDS, STALL_FACTOR * self.info.step_seconds)
        if pong.seconds > limit:
            self.give_up(f"{pong.phase}, step {pong.step}: {pong.seconds:.0f} s, limit {limit:.0f} s")

    # --- requests ---

    async def submit(self, request: Request, pixels: Sequence[Pixels]) -> AsyncGenerator[Delta]:
        """Deltas until every choice has finished; closing the iterator aborts the rest."""
        if not self.alive or self.writer is None:
            raise Unavailable(STOPPED, retry_after=5)
        self.submitted += 1
        if request.rule is not None and request.rule.grammar:
            await self.enter_with_vocabulary()
        entry = OpenRequest(asyncio.Queue(), pixels, set(range(request.params.n)))
        self.requests[request.id] = entry
        try:
            await self.send(wire.Add(request))
            left = len(entry.left)
            while left:
                delta = await entry.deltas.get()
                left -= delta.finish is not None
                yield delta
        finally:
            if self.requests.pop(request.id, None) is not None:
                self.write(wire.Abort([request.id]))

    def abort(self, id: str, choice: int = -1) -> None:
        """Aborts one choice (or all of them): its stream ends with ``finish="abort"``."""
        entry = self.requests.get(id)
        if entry is None:
            return
        chosen = sorted(entry.left) if choice < 0 else [choice] if choice in entry.left else []
        if chosen:
            self.write(wire.Abort([id], choice))
        for one in chosen:
            self.deliver(Delta(id, one, finish="abort"))

    async def enter_with_vocabulary(self) -> None:
        """Waits until the engine has the vocabulary; meanwhile a request counts as inside."""
        self.entering += 1
        try:
            await self.send_vocabulary()
        finally:
            self.entering -= 1
        if not self.alive:
            raise Unavailable(STOPPED, retry_after=5)

    async def send_vocabulary(self) -> None:
        """Sends the vocabulary of grammars, once: all who need it wait for the same task, unless that failed."""
        task = self.vocabulary_sent
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self.vocabulary_sent = asyncio.create_task(self._send_vocabulary())
        await asyncio.shield(task)

    async def _send_vocabulary(self) -> None:
        if self.vocabulary is None:
            raise Unavailable("This server has no vocabulary for grammars.")
        data = memoryview(await self.vocabulary())
        for offset in range(0, len(data), wire.CHUNK):
            await self.send(wire.VocabularyPart(offset, len(data)), data[offset : offset + wire.CHUNK])

    async def feed(self) -> None:
        """Sends the pixels that the engine asks for, item by item, in chunks that leave room for other frames."""
        while True:
            id, index = await self.wanted.get()
            entry = self.requests.get(id)
            if entry is None:
                continue
            if index >= len(entry.pixels):
                await self.send(wire.MediaFailed(id, index, 500, "The image is no longer available."))
                continue
            data = np.ascontiguousarray(entry.pixels[index]).reshape(-1).data
            for offset in range(0, len(data), wire.CHUNK):
                if id not in self.requests:
                    break
                chunk = data[offset : offset + wire.CHUNK]
                await self.send(wire.Media(id, index, offset, len(data)), chunk)

    # --- frames to the engine ---

    def write(self, message: wire.Down, payload: bytes | memoryview[Any] = b"") -> None:
        """Writes one frame; does nothing if the socket is closed."""
        if self.writer is None or self.writer.is_closing():
            return
        self.writer.write(wire.frame(message, payload))
        if payload:
            self.writer.write(payload)

    async def send(self, message: wire.Down, payload: bytes | memoryview[Any] = b"") -> None:
        """Writes one frame and waits while the socket is full. ``run`` handles a broken socket."""
        self.write(message, payload)
        if self.writer is not None:
            try:
                await self.writer.drain()
            except OSError:
                log.debug("the engine's socket broke while a frame was sent")

    async def watch(self) -> None:
        """Pings the engine. Counts unanswered pings, not seconds, so a blocked event loop here kills no healthy engine.

        While the engine loads, imports may block its reader thread, so only the limit of loading applies.
        """
        while True:
            if self.info is None:
                self.await_start()
            elif self.pinged - self.ponged >= MISSED_PONGS:
                self.give_up(f"no sign of life for {self.pinged - self.ponged} s")
            self.pinged += 1
            self.write(wire.Ping(self.pinged))
            await asyncio.sleep(PING_EVERY)

    def await_start(self) -> None:
        """Kills an engine that takes too long to start; until then, pings that it does not answer do not count."""
        if time.monotonic() - self.born > self.compile_timeout:
            self.give_up(f"not ready after {self.compile_timeout:.0f} s")
        self.ponged = self.pinged


def announce(info: wire.EngineInfo) -> None:
    """Logs the lines that start-up scripts look for."""
    tokens = info.num_blocks * info.block_size
    log.info("engine ready on %s, %s, after %.1f s", info.device, info.dtype, info.seconds)
    log.info("KV cache size: %s tokens", f"{tokens:,}")
    # As vLLM words them on every device; scripts read the numbers.
    log.info("GPU KV cache size: %s tokens", f"{tokens:,}")
    log.info("# GPU blocks: %d, # CPU blocks: 0", info.num_blocks)
    if info.max_model_len:
        log.info(
            "Maximum concurrency for %s tokens per request: %.2fx",
            f"{info.max_model_len:,}",
            tokens / info.max_model_len,
        )
    for note in info.notes:
        log.info("engine: %s", note)
    if info.graphs is not None:
        for line in graph_report.lines(info.graphs):
            log.info("%s", line)
