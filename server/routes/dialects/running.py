"""Runs the chat request that a request of another API has become."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from trencadis.core.errors import BadRequest
from trencadis.server.admission import Ticket
from trencadis.server.dialects.blocks import BlockEvent, Blocks
from trencadis.server.dialects.names import told_in
from trencadis.server.dialects.talk import InnerRequest
from trencadis.server.prompts.output import TextPiece
from trencadis.server.protocol.base import Usage
from trencadis.server.protocol.dialect import DialectRequest
from trencadis.server.routes.answering import answer
from trencadis.server.routes.chat import ChatRoute, prompt_of
from trencadis.server.routes.sse import StreamForm
from trencadis.server.routes.state import AppState, check_priority, forget_json, runs_the_model
from trencadis.server.routes.streams.pieces import PieceStream
from trencadis.server.routes.tokens import ticketed
from trencadis.server.text.off_loop import OffLoop, small

_OFF_LOOP = OffLoop("dialect")


class Writer(Protocol):
    """Says an answer in the words of one API."""

    def opening(self, usage: Usage) -> Iterator[bytes]:
        """The first events; ``usage``: when the first token is there."""
        ...

    def events(self, change: BlockEvent) -> Iterator[bytes]:
        """The events of a change."""
        ...

    def take(self, change: BlockEvent) -> None:
        """As ``events``, for an answer that is sent whole."""
        ...

    def closing(self) -> Iterator[bytes]:
        """The last events, once the answer is complete."""
        ...


@dataclass(slots=True)
class DialectRun:
    """A running request.

    Args:
        chat: runs it; its one choice is the answer.
        complete_by: completes the answer, given its last piece and OpenAI's finish reason, and returns it.
    """

    chat: ChatRoute
    writer: Writer
    form: StreamForm
    complete_by: Callable[[TextPiece, str | None], BaseModel]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, images included."""
        return self.chat.prompt_tokens

    async def complete(self) -> BaseModel:
        """Runs to the end and returns the whole answer."""
        blocks, last = self.blocks(), TextPiece("")
        async with aclosing(self.chat.generation.pieces()) as pieces:
            async for _, last in pieces:
                for change in blocks.feed(last):
                    self.writer.take(change)
        reason = self.chat.reason(0, last)
        for change in blocks.finish(reason == "length"):
            self.writer.take(change)
        return self.complete_by(last, reason)

    def stream(self) -> DialectStream:
        """Its stream."""
        return DialectStream(self)

    def blocks(self) -> Blocks:
        """Makes the blocks of the answer."""
        return Blocks(self.chat.state.service.eos | frozenset(self.chat.generation.params.stop_token_ids))


class DialectStream(PieceStream):
    """The events of ``run``, in the words of its writer."""

    def __init__(self, run: DialectRun) -> None:
        super().__init__(run.chat.generation)
        self._run, self._blocks = run, run.blocks()
        self._last: TextPiece | None = None

    def said(self, index: int, piece: TextPiece) -> bytes:
        """See ``PieceStream``."""
        writer = self._run.writer
        made = [] if self._last is not None else [*writer.opening(self._run.chat.usage)]
        self._last = piece
        for change in self._blocks.feed(piece):
            made += writer.events(change)
        return b"".join(made)

    def ending(self) -> bytes:
        """See ``PieceStream``."""
        run, last = self._run, self._last or TextPiece("")
        reason = run.chat.reason(0, last)
        made = [event for change in self._blocks.finish(reason == "length") for event in run.writer.events(change)]
        run.complete_by(last, reason)
        return b"".join([*made, *run.writer.closing()])


async def answered(
    state: AppState, http: Request, inner: InnerRequest, headers: dict[str, str],
    run: Callable[[Ticket], Awaitable[DialectRun]], stream: bool,
) -> Response:  # fmt: skip
    """The response of a translated request; errors name the fields that were sent.

    Args:
        run: makes the run, which is charged to the ticket.
    """
    runs_the_model()
    ticket = state.admission.enter()
    keep_alive = state.settings.config.sse_keep_alive_interval
    with told_in(inner.names):
        return await answer(http, ticket, run(ticket), stream, keep_alive, headers)


async def counted(state: AppState, http: Request, inner: InnerRequest) -> int:
    """The tokens of a translated request's prompt, images included."""
    ticket = state.admission.enter()
    with told_in(inner.names):
        prompt = prompt_of(state, inner.chat, http, ticket, state.service.counted)
        return len((await ticketed(http, ticket, prompt)).tokens)


async def translated(
    state: AppState, body: DialectRequest, http: Request, translate: Callable[[], InnerRequest], *values: Any
) -> tuple[InnerRequest, dict[str, str]]:
    """The chat request of ``body``, checked, and the response's headers; the conversation stays in the former alone.

    Args:
        values: what ``translate`` walks through; long ones are translated off the event loop.

    Raises:
        TrencadisError: the request may not run; ``param`` names its own fields.
    """
    state.check_model(body.model)
    body.check()
    check_priority(body.priority)
    try:
        inner = translate() if small(*values) else await _OFF_LOOP.run(lambda check: translate())
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(str(first["msg"]), param=".".join(map(str, first["loc"]))) from None
    with told_in(inner.names):
        inner.chat.check()
        headers = state.check_fields(body, inner.chat, inner.names.name)
    body.forget()
    forget_json(http)
    return inner, headers
