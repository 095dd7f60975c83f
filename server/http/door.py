"""The ASGI layer behind the gate under ``--scheduling-policy fair``: a request waits here for its tenant's turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.admission import Admission, BodyCharge
from trencadis.server.records.record import RequestRecord
from trencadis.server.routes.sse import ClientGone
from trencadis.server.tenants.account import CURRENT
from trencadis.server.tenants.turns import TenantTurn, Turns, TurnStage

SMALL = 1 << 16
"""Bytes of a body that cost as much to prepare as a request costs beside its body."""
UNREAD = 320 << 10
"""Most bytes of a body that lie in this process before somebody reads it: uvicorn pauses a connection that has more
than 64 KiB, and 256 KiB may come at once. The rest stays with the system."""
CONNECTION = "trencadis.connection"
TURN = "trencadis.turn"


class Hangable(Protocol):
    """A connection that tells when it is lost."""

    on_lost: partial[None] | None


class TurnDoor:
    """Wraps the application behind the gate, which has read the head of a request and checked its key."""

    def __init__(self, app: ASGIApp, turns: Turns, admission: Admission) -> None:
        self._app, self._turns, self._admission = app, turns, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, after its turn has come; a request without a body has none."""
        size = body_size(scope) if scope["type"] == "http" else 0
        if not size:
            await self._app(scope, receive, send)
            return
        account = CURRENT.get()
        name, weight = ("", 1.0) if account is None else (account.tenant.name, account.tenant.weight)
        turn = scope[TURN] = self._turns.enter(name, weight, 1.0 + size / SMALL)

        async def out(message: Message) -> None:
            if message["type"] == "http.response.start":
                turn.leave()
            await send(message)

        try:
            if turn.stage is not TurnStage.WAITING:
                await self._app(scope, receive, out)
                return
            # Who is let in later is counted now, so that a full server says so at once.
            with self._admission.early():
                await self._wait(turn, scope, min(size, UNREAD))
                await self._app(scope, receive, out)
        finally:
            turn.leave()

    async def _wait(self, turn: TenantTurn, scope: Scope, unread: int) -> None:
        """Waits until the turn comes; ``unread`` bytes of the body may lie here meanwhile.

        Raises:
            ClientGone: the client has disconnected.
            QueueFull: bodies leave no room.
            Unavailable: the server ends.
        """
        record: RequestRecord = scope["trencadis.record"]
        body: BodyCharge = scope["trencadis.body"]
        assert turn.come is not None
        begun = time.monotonic()
        body.charge(unread)
        try:
            known = scope.get(CONNECTION)
            with _watched(None if known is None else known(), turn):
                await turn.come
        finally:
            body.give(unread)
            record.turn = time.monotonic() - begun


@contextmanager
def _watched(connection: Hangable | None, turn: TenantTurn) -> Iterator[None]:
    """Ends the wait of a client that disconnects."""
    if connection is None:
        yield
        return
    connection.on_lost = partial(turn.end, ClientGone())
    try:
        yield
    finally:
        connection.on_lost = None


def body_size(scope: Scope) -> int:
    """Bytes of the body that a head announces; of one in chunks, as many as may lie here unread."""
    size = 0
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            size = int(value)
        elif name == b"transfer-encoding":
            return UNREAD
    return size
