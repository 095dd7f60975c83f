"""Requests that are open at another process: their deltas, their pixels on demand, the vocabulary before a grammar.
Used by ``server/engine/engine_link.py`` towards an engine's process, and by each of several API processes towards the
process that has the engine (``server/processes/remote_engine.py``).

An open request: queued deltas for its reader, its pixels and its unfinished choices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from trencadis.core.errors import QueueFull, Unavailable
from trencadis.core.process import engine_messages
from trencadis.core.request import Delta, Request
from trencadis.server.engine.engine_client import DeltaCallback, Pixels

SMALL_BACKLOG = 32 << 10
"""Bytes of deltas of a choice that may wait for the reader without being counted: a hundred tokens, or ten with
log-probabilities."""
DELTA_BYTES = 300
"""Bytes of a delta with one token."""
LOGPROB_BYTES = 400
"""Bytes of the log-probability of one token."""
CANDIDATE_BYTES = 72
"""Bytes of each other token in it."""


def estimate_size(delta: Delta) -> int:
    """Returns the bytes of memory that a delta takes, without what it tells of the prompt, which the budget of answers
    counts.
    """
    size = DELTA_BYTES + 40 * len(delta.tokens)
    if delta.logprobs is not None:
        size += len(delta.logprobs) * LOGPROB_BYTES
        size += CANDIDATE_BYTES * sum([len(one.top_ids) for one in delta.logprobs])
    return size


class Backlog:
    """Bytes of deltas that wait for their readers, which are clients that read slower than the engine writes.

    Args:
        most: bytes of one request.
        total: bytes of all requests, without the first ``SMALL_BACKLOG`` of each choice.
        reserved: returns the bytes of ``total`` that other answers of this process may take.
    """

    def __init__(self, most: int = 64 << 20, total: int = 256 << 20, reserved: Callable[[], int] = lambda: 0) -> None:
        self.most, self.total, self.reserved = most, total, reserved
        self.held = 0

    def fits(self, size: int) -> bool:
        """Returns True if a request may have ``size`` bytes, and all may have what they have."""
        return size <= self.most and self.held + self.reserved() <= self.total


BACKLOG = Backlog()
"""That of this process; its application sets the bounds."""


class OpenRequest:
    """One open request.

    A delta waits for its reader, which is a task: waking it takes longer than handling a token. So a reader may
    register a ``callback``, which is called at once instead while the reader waits and nothing is queued. The order is
    kept, since a reader waits only once it has handled all earlier deltas.

    Args:
        choices: its number of choices.
        backlog: bounds what waits for the reader.
    """

    __slots__ = (
        "_backlog", "_choices", "_counted", "_deltas", "_held", "_reader", "callback", "pixels", "unfinished",
    )  # fmt: skip

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
                waits = self._held
                self.drop()
                self._wake(QueueFull(f"The answer is read too slowly: {waits} bytes of it wait.", retry_after=1))
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
        self._held = 0
        self._count(0)

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
        vocabulary: returns the packed ``core.masks.vocabulary.Vocabulary``; called once, before the first request with
        a grammar is sent.
    """

    def __init__(self, vocabulary: Callable[[], Awaitable[bytes]] | None = None) -> None:
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
        if self.vocabulary is None:
            raise Unavailable("This server has no vocabulary for grammars.")
        data = memoryview(await self.vocabulary())
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
