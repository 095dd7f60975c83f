"""ASGI middleware inside the request middleware, for ``--scheduling-policy fair``.

A request waits here until its tenant's fair share admits it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.metrics.request_record_logs_and_metrics import RequestRecord
from trencadis.server.routes.sse import ClientGone
from trencadis.server.tenants.fair_queue import FairQueueEntry, FairQueueStage, TenantFairQueue
from trencadis.server.tenants.server_admission_and_byte_budgets import Admission, BodyCharge
from trencadis.server.tenants.tenant_registry import CURRENT

SMALL_BODY = 1 << 16
"""Body size in bytes from which preparing the body takes as long as the rest of a request's preparation."""
MAX_UNREAD = 320 << 10
"""Maximum bytes of a body in this process before it is read: uvicorn pauses a connection that has more than 64 KiB,
and 256 KiB may arrive at once. The rest stays in the system's buffers.
"""
CONNECTION_KEY = "trencadis.connection"
QUEUE_ENTRY_KEY = "trencadis.turn"


class DisconnectNotifier(Protocol):
    """Protocol of a connection that calls ``on_lost`` when the client disconnects."""

    on_lost: partial[None] | None


class FairAdmissionMiddleware:
    """ASGI middleware that holds a request in the tenants' fair queue before its body is read."""

    def __init__(self, app: ASGIApp, queue: TenantFairQueue, admission: Admission) -> None:
        self._app, self._queue, self._admission = app, queue, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, after its admission. A request without a body, or to an open path without a key, is not
        queued: it costs little, and must take no tenant's place.
        """
        size = get_body_size(scope) if scope["type"] == "http" and scope.get("trencadis.tenant") else 0
        if not size:
            await self._app(scope, receive, send)
            return
        account = CURRENT.get()
        name, weight = ("", 1.0) if account is None else (account.tenant.name, account.tenant.weight)
        entry = scope[QUEUE_ENTRY_KEY] = self._queue.enter(name, weight, 1.0 + size / SMALL_BODY)

        async def out(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.finish()
            await send(message)

        try:
            if entry.stage is not FairQueueStage.WAITING:
                await self._app(scope, receive, out)
                return
            # Counted now although it is admitted later, so that a full server refuses it at once.
            with self._admission.hold_early_ticket():
                await self._wait_for_admission(entry, scope, min(size, MAX_UNREAD))
                await self._app(scope, receive, out)
        finally:
            entry.finish()

    async def _wait_for_admission(self, entry: FairQueueEntry, scope: Scope, unread: int) -> None:
        """Waits for admission; ``unread`` bytes of the body may be buffered meanwhile.

        Raises:
            ClientGone: the client has disconnected.
            QueueFull: other bodies leave no room.
            Unavailable: the server is ending.
        """
        record: RequestRecord = scope["trencadis.record"]
        body: BodyCharge = scope["trencadis.body"]
        assert entry.admitted is not None
        begun = time.monotonic()
        body.charge(unread)
        try:
            known = scope.get(CONNECTION_KEY)
            with _end_on_disconnect(None if known is None else known(), entry):
                await entry.admitted
        finally:
            body.give(unread)
            record.fair_queue_seconds = time.monotonic() - begun


@contextmanager
def _end_on_disconnect(connection: DisconnectNotifier | None, entry: FairQueueEntry) -> Iterator[None]:
    """Ends the wait of a client that disconnects."""
    if connection is None:
        yield
        return
    connection.on_lost = partial(entry.fail, ClientGone())
    try:
        yield
    finally:
        connection.on_lost = None


def get_body_size(scope: Scope) -> int:
    """Returns the announced body size in bytes; for a chunked body, the most that is buffered unread."""
    size = 0
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            size = int(value)
        elif name == b"transfer-encoding":
            return MAX_UNREAD
    return size
