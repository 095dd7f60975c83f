"""Runs a checked request and makes its response, for all generating routes."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.prompts.generation import primed
from trencadis.server.routes.sse import EventStream, StreamForm, until_gone
from trencadis.server.routes.streams.pieces import PieceStream


class Work(Protocol):
    """A prepared request."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        ...

    @property
    def form(self) -> StreamForm:
        """How its stream ends and fails."""
        ...

    async def complete(self) -> BaseModel:
        """Runs to the end and returns the whole answer."""
        ...

    def stream(self) -> PieceStream:
        """Its stream; called once."""
        ...


async def answer(
    http: Request, ticket: Ticket, begun: Awaitable[Work], stream: bool, keep_alive: float, headers: Mapping[str, str]
) -> Response:
    """The response; the ticket is released at its end, or by an error before it.

    Args:
        begun: the work before the engine.
        keep_alive: seconds of silence after which a stream sends a comment; 0: never.

    Raises:
        TrencadisError: the request cannot run, or fails before anything is sent.
        ClientGone: the client has disconnected.
    """
    if stream:
        return await _streamed(http, ticket, begun, keep_alive, headers)
    try:
        whole = await until_gone(http, _completed(ticket, begun))
        return Response(whole.model_dump_json(), headers=headers, media_type="application/json")
    finally:
        ticket.leave()


async def _completed(ticket: Ticket, prepared: Awaitable[Work]) -> BaseModel:
    """The whole answer of what ``prepared`` gives."""
    work = await prepared
    ticket.charge(tokens=work.prompt_tokens)
    return await work.complete()


async def _streamed(
    http: Request, ticket: Ticket, prepared: Awaitable[Work], keep_alive: float, headers: Mapping[str, str]
) -> Response:
    """The stream, once its first event is there."""
    try:
        work = await until_gone(http, prepared)
        ticket.charge(tokens=work.prompt_tokens)
        stream = work.stream()
        events = await until_gone(http, primed(stream.events()))
    except BaseException:
        ticket.leave()
        raise
    return EventStream(events, keep_alive, ticket.leave, headers, work.form, stream.divert)
