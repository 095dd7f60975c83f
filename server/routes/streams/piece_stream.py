"""A stream whose events are made from one piece of text after another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from trencadis.server.prompts.generation import ChoicePiece, Generation, StreamWriter
from trencadis.server.prompts.output_processor import TextPiece
from trencadis.server.routes.json_slices import is_wide, off_event_loop


class PieceStream:
    """The stream of one request; subclasses make its events.

    Args:
        generation: the source of its pieces, if there is only one.
        top: log-probabilities reported with each token; -1: all.
    """

    def __init__(self, generation: Generation | None, top: int | None = None) -> None:
        self._generation = generation
        self._apart = is_wide(top)
        """True if events are made in a thread."""

    def make_events(self, index: int, piece: TextPiece) -> bytes:
        """Makes the events of a piece of choice ``index``; empty while there is nothing to send."""
        raise NotImplementedError

    def make_final_events(self) -> bytes:
        """Makes the events once all choices have ended."""
        return b""

    def stream_pieces(self) -> AsyncGenerator[ChoicePiece]:
        """Yields the pieces, each with the index of its choice in the answer."""
        assert self._generation is not None
        return self._generation.stream_pieces()

    async def stream_events(self) -> AsyncGenerator[bytes]:
        """Yields all events; they begin with the first piece, so that an error before it is a plain HTTP error."""
        async with aclosing(self.stream_pieces()) as pieces:
            async for index, piece in pieces:
                data = await self._make_apart(index, piece) if self._apart else self.make_events(index, piece)
                if data:
                    yield data
        data = self.make_final_events()
        if data:
            yield data

    async def _make_apart(self, index: int, piece: TextPiece) -> bytes:
        return await off_event_loop.run(lambda check: self.make_events(index, piece))

    def set_writer(self, writer: StreamWriter) -> None:
        """Writes events to ``writer`` at once while the reader of ``stream_events`` waits; see
        ``Generation.set_writer``.
        """
        if self._generation is not None and not self._apart:
            self._generation.set_writer(writer, self.make_events)
