"""Runs requests on the engine and yields pieces of text; aborts what is still running in every case.

Callers close generators explicitly (``aclosing``), because leaving a loop over a generator does not close it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple, Protocol, TypeVar

from trencadis.core.errors import TrencadisError
from trencadis.core.request import Delta, Request
from trencadis.core.spec.predicted_text import PredictedText
from trencadis.server.engine.engine_client_and_request_timing import EngineClient, Pixels, RequestTiming
from trencadis.server.prompts.output_processor import ChoiceStream, TextPiece
from trencadis.server.prompts.prompt_and_chat_messages import Prompt
from trencadis.server.prompts.prompt_builder import TextService

T = TypeVar("T")


class ChoicePiece(NamedTuple):
    """A piece of text of one choice of a request."""

    choice: int
    piece: TextPiece


class StreamWriter(Protocol):
    """The destination of a stream's bytes."""

    def is_ready(self) -> bool:
        """Returns True while the client is connected and its send buffer is not full."""
        ...

    def write(self, data: bytes) -> None:
        """Writes whole events; call ``is_ready`` before."""
        ...


class PromptPiece(NamedTuple):
    """A piece of text of one choice of one of a request's prompts."""

    prompt: int
    choice: int
    piece: TextPiece


MAX_QUEUED = 256
"""Pieces of the prompts of a request that wait for its reader."""
MANY_GAPS = 512
"""Gaps between tokens of a request that are kept before they are counted."""
STARTS_PER_PASS = 16
"""Generations of one request that start before the event loop serves others."""


def start_timing(request: Request, prompt: Prompt, streams: list[ChoiceStream]) -> RequestTiming:
    """Starts the timing of a request that begins now, with its media and the times of their preparation."""
    p, tokens = request.params, len(prompt.tokens)
    made = RequestTiming(request.id, time.monotonic(), tokens, 0, p.max_tokens or 0, p.n, streams=streams)
    if prompt.media:
        made.image_tokens, made.media = sum(medium.tokens for medium in prompt.media), len(prompt.media)
        made.prepared, made.media_seconds = prompt.times.num_prepared, prompt.times.seconds
        made.media_begun, made.media_ended = prompt.times.started, prompt.times.ended
    return made


class Generation:
    """One engine request with the streams of its choices and its timing.

    Args:
        done: called once, however the request ends.
    """

    def __init__(
        self,
        engine: EngineClient,
        service: TextService,
        request: Request,
        prompt: Prompt,
        done: Callable[[RequestTiming], None] | None = None,
    ) -> None:
        self._engine = engine
        self._request = request
        self._pixels: Sequence[Pixels] = prompt.pixels if prompt.media else ()
        self._done = done
        self.prompt = prompt
        self.params = request.params
        self.streams = [service.make_stream(self.params, prompt) for _ in range(self.params.n)]
        self.timing = start_timing(request, prompt, self.streams)
        self.predicted = PredictedText(request.prediction) if request.prediction else None
        """The predicted answer, which follows the first choice; None: nothing is predicted."""
        self._left = len(self.streams)
        self._spacing = StreamInterval(prompt.interval) if prompt.interval > 1 else None
        self.on_gaps: Callable[[RequestTiming], None] | None = None
        """Counts the gaps of an answer so far, which are forgotten then: a long one has millions."""
        self.said: list[list[str]] | None = None
        """Pieces of each choice's text, if they are logged; else None."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Generated tokens within the reasoning; None if reasoning is not separated from content."""
        counts = [s.reasoning_tokens for s in self.streams if s.reasoning_tokens is not None]
        return sum(counts) if counts else None

    async def stream_pieces(self) -> AsyncGenerator[ChoicePiece]:
        """Yields pieces of text as they come, or joined to the prompt's interval of tokens, until every choice has
        finished.

        Raises:
            TrencadisError: the engine failed.
        """
        deltas = None
        try:
            deltas = self._engine.submit(self._request, self._pixels)
            async for delta in deltas:
                piece = self._feed(delta)
                if piece is not None:
                    yield ChoicePiece(delta.choice, piece)
                if not self._left:
                    return
            raise TrencadisError("The engine ended the request without finishing it.")
        except Exception:
            self.timing.finish.append("error")
            raise
        finally:
            await self._close(deltas)

    def set_writer(self, writer: StreamWriter, make_events: Callable[[int, TextPiece], bytes]) -> None:
        """Writes the events of each piece directly to ``writer`` while the reader of ``stream_pieces`` is idle and the
        writer is ready.

        ``make_events`` gets the choice and the piece and returns the bytes of its events. The last piece of
        a choice is read from ``stream_pieces`` as before, unless a stop string made it the last.
        """

        def take(delta: Delta) -> bool:
            if not writer.is_ready():
                return False
            piece = self._feed(delta)
            if piece is not None:
                data = make_events(delta.choice, piece)
                if data:
                    writer.write(data)
            return True

        self._engine.set_delta_callback(self._request.id, take)

    def _feed(self, delta: Delta) -> TextPiece | None:
        """Returns the piece of a delta; None if its choice has ended before, or the piece is held back."""
        choice = delta.choice
        stream = self.streams[choice]
        if stream.finish_reason is not None:
            return None  # tokens beyond the stop string that has ended the choice
        piece = stream.feed(delta)
        self.timing.add_tokens(choice, len(piece.tokens))
        if len(self.timing.gaps) >= MANY_GAPS and self.on_gaps is not None:
            self.timing.engine = max(self._request.replica, 0)
            self.on_gaps(self.timing)
            self.timing.gaps.clear()
        if self.predicted is not None:
            for token in piece.tokens:
                self.predicted.accept(token)
        if self.said is not None:
            self.said[choice].append(piece.text)
        if piece.finish_reason is not None:
            self._left -= 1
            self.timing.finish.append(piece.finish_reason)
            if delta.finish is None and stream.stopped_early:
                self._engine.abort(self._request.id, choice)
        return piece if self._spacing is None else self._spacing.join(choice, piece)

    async def _close(self, deltas: AsyncIterator[object] | None) -> None:
        if self._left:
            self._abort()
        if self.timing.end is None:
            self.timing.end = time.monotonic()
            self.timing.engine = max(self._request.replica, 0)
            if self._done is not None:
                self._done(self.timing)
        close = getattr(deltas, "aclose", None)
        if close is not None:
            with suppress(RuntimeError):
                await close()

    def _abort(self) -> None:
        self._engine.abort(self._request.id)
        if "error" not in self.timing.finish:
            self.timing.finish.append("abort")


class StreamInterval:
    """Joins pieces of each choice until they have ``interval`` tokens; the first and the last piece do not wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, TextPiece] = {}
        self._begun: set[int] = set()

    def join(self, choice: int, piece: TextPiece) -> TextPiece | None:
        """Returns the piece to send now, with all that was held back before it; None while it is held back."""
        held = self._held.pop(choice, None)
        if held is not None:
            held.extend(piece)
            piece = held
        if choice in self._begun and len(piece.tokens) < self._interval and piece.finish_reason is None:
            self._held[choice] = piece
            return None
        self._begun.add(choice)
        return piece


async def merge_generations(generations: Sequence[Generation]) -> AsyncGenerator[PromptPiece]:
    """Yields pieces of several generations as they come; the first error ends all of them."""
    if len(generations) == 1:
        async with aclosing(generations[0].stream_pieces()) as pieces:
            async for choice, piece in pieces:
                yield PromptPiece(0, choice, piece)
        return
    # Bounded: what a slow reader leaves is counted where deltas wait (``engine_client_and_request_timing.Backlog``).
    queue: asyncio.Queue[PromptPiece | BaseException | None] = asyncio.Queue(MAX_QUEUED)

    async def pump(index: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.stream_pieces()) as pieces:
                async for choice, piece in pieces:
                    await queue.put(PromptPiece(index, choice, piece))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for i, generation in enumerate(generations):
            tasks.append(asyncio.create_task(pump(i, generation)))
            if i % STARTS_PER_PASS == STARTS_PER_PASS - 1:
                await asyncio.sleep(0)
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for_first(items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Waits for the first item, so that an error before it becomes an HTTP error, and returns an iterator over all
    items.
    """
    try:
        first = await anext(items)
    except StopAsyncIteration:
        return _chain_items([], items)
    return _chain_items([first], items)


async def _chain_items(head: Sequence[T], items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    async with aclosing(items):
        for item in head:
            yield item
        async for item in items:
            yield item
