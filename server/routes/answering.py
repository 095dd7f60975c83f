"""From a request that may run to its response: what the chat and completions routes share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.admission import Ticket
from trencadis.server.prompts.generation import primed
from trencadis.server.routes.sse import EventStream, until_gone


class Work(Protocol):
    """A prepared request."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts."""
        ...

    async def complete(self) -> BaseModel:
        """Runs to the end and answers in one piece."""
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
    """The response; the ticket is given back with its end, or with an error before it.

    Args:
        prepared: what comes before the engine.
        keep_alive: seconds of a stream's silence after which a comment is sent; 0: never.

    Raises:
        TrencadisError: the request cannot run, or failed before anything was sent.
        ClientGone: nobody reads the answer any more.
    """
    streaming = False
    try:
        work = await until_gone(http, prepared)
        ticket.charge(tokens=work.prompt_tokens)
        if stream:
            events = await until_gone(http, primed(work.events()))
            streaming = True
            return EventStream(events, keep_alive, ticket.leave, headers)
        whole = await until_gone(http, work.complete())
        return Response(whole.model_dump_json(), headers=headers, media_type="application/json")
    finally:
        if not streaming:
            ticket.leave()
