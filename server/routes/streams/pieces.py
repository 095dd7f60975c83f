"""A stream whose events are made of one piece of text after another."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from trencadis.server.prompts.generation import ChoicePiece, Generation, Outlet
from trencadis.server.prompts.output import TextPiece


class PieceStream:
    """The stream of one request; sub-classes say what its events are.

    Args:
        generation: where its pieces come from, if it is one.
    """

    def __init__(self, generation: Generation | None) -> None:
        self._generation = generation

    def said(self, index: int, piece: TextPiece) -> bytes:
        """The events of a piece of choice ``index``; none while there is nothing to say."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """The events once all choices have ended."""
        return b""

    def pieces(self) -> AsyncGenerator[ChoicePiece]:
        """The pieces, each with the index of its choice in the answer."""
        assert self._generation is not None
        return self._generation.pieces()

    async def events(self) -> AsyncGenerator[bytes]:
        """All events; they begin with the first piece, so that an error before it is a plain HTTP error."""
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                data = self.said(index, piece)
                if data:
                    yield data
        data = self.ending()
        if data:
            yield data

    def divert(self, outlet: Outlet) -> None:
        """Writes events to ``outlet`` at once while whoever reads ``events`` waits; see ``Generation.divert``."""
        if self._generation is not None:
            self._generation.divert(outlet, self.said)
