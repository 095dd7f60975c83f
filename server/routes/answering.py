"""Runs a checked request and makes its response, for all generating routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.prompts.generation import primed
from trencadis.server.routes.sse import EventStream, StreamForm, until_gone


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

    def events(self) -> AsyncGenerator[bytes]:
        """The stream, encoded."""
        ...


async def answer(
    http: Request,
    ticket: Ticket,
    prepared: Awaitable[Work],
    stream: bool,
    keep_alive: float,
    headers: Mapping[str, str],
) -> Response:
    """The response; the ticket is released at its end, or by an error before it.

    Args:
        prepared: the work before the engine.
        keep_alive: seconds of silence after which a stream sends a comment; 0: never.

    Raises:
        TrencadisError: the request cannot run, or fails before anything is sent.
        ClientGone: the client has disconnected.
    """
    streaming = False
    try:
        work = await until_gone(http, prepared)
        ticket.charge(tokens=work.prompt_tokens)
        if stream:
            events = await until_gone(http, primed(work.events()))
            streaming = True
            return EventStream(events, keep_alive, ticket.leave, headers, work.form)
        whole = await until_gone(http, work.complete())
        return Response(whole.model_dump_json(), headers=headers, media_type="application/json")
    finally:
        if not streaming:
            ticket.leave()
