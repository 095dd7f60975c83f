"""Runs a checked request and makes its response, for all generating routes."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from trencadis.server.prompts.generation import wait_for_first
from trencadis.server.routes.json_slices import SlicedResponse
from trencadis.server.routes.sse import EventStream, PieceStream, StreamFormat, run_until_disconnect
from trencadis.server.tenants.admission import Ticket


class PreparedRequest(Protocol):
    """A prepared request."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all its prompts."""
        ...

    def estimate_output(self, usual: int) -> int:
        """Most tokens of its answers, or ``usual`` of each whose length it does not limit."""
        ...

    @property
    def form(self) -> StreamFormat:
        """The events for keep-alive, errors and the end of its stream."""
        ...

    async def complete(self, lazy: bool = False) -> BaseModel:
        """Runs to the end and returns the whole answer; ``lazy``: its long lists may be ``json_slices.LazyItems``."""
        ...

    def stream(self) -> PieceStream:
        """Returns the stream of its events; called once."""
        ...


async def run_request(
    http: Request,
    ticket: Ticket,
    begun: Awaitable[PreparedRequest],
    stream: bool,
    keep_alive: float,
    headers: Mapping[str, str],
) -> Response:
    """Runs a request and makes its response; the ticket is released at its end, or by an error before it.

    Args:
        begun: the work before generation, which returns the prepared request.
        keep_alive: seconds of silence after which a stream sends a comment; 0: never.

    Raises:
        TrencadisError: the request cannot run, or fails before anything is sent.
        ClientGone: the client has disconnected.
    """
    if stream:
        return await _start_stream(http, ticket, begun, keep_alive, headers)
    try:
        whole = await run_until_disconnect(http, _run_to_end(ticket, begun))
        charge = ticket.take_answer()
        if charge is None:
            return Response(whole.model_dump_json(), headers=headers, media_type="application/json")
        return SlicedResponse(whole, charge.release, headers)
    finally:
        ticket.leave()


async def _run_to_end(ticket: Ticket, prepared: Awaitable[PreparedRequest]) -> BaseModel:
    """Runs the prepared request to its end and returns the whole answer."""
    work = await prepared
    _charge_tokens(ticket, work)
    return await work.complete(lazy=ticket.answer is not None and ticket.answer.is_large)


def _charge_tokens(ticket: Ticket, work: PreparedRequest) -> None:
    """Charges the prompts, and to a tenant the answers too: what starts at once would exceed its rate many times."""
    account = ticket.account
    output = 0 if account is None else work.estimate_output(math.ceil(account.usual_length))
    ticket.charge(tokens=work.prompt_tokens, output=output)


async def _start_stream(
    http: Request, ticket: Ticket, prepared: Awaitable[PreparedRequest], keep_alive: float, headers: Mapping[str, str]
) -> Response:
    """Returns the stream, once its first event has arrived."""
    try:
        work = await run_until_disconnect(http, prepared)
        _charge_tokens(ticket, work)
        stream = work.stream()
        events = await run_until_disconnect(http, wait_for_first(stream.stream_events()))
    except BaseException:
        ticket.leave()
        raise
    return EventStream(events, keep_alive, ticket.leave, headers, work.form, stream.set_writer)
