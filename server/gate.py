"""The outermost ASGI layer: request ids, keys, content type, body size, and an envelope around every failure."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.core.errors import BadRequest, QueueFull, TooLarge, TrencadisError
from trencadis.server.admission import Body, BodyBudget
from trencadis.server.auth import Keys
from trencadis.server.protocol.base import ErrorResponse
from trencadis.server.sse import ClientGone

log = logging.getLogger("trencadis.server")
CLOSED = 499
ID_SIZE = 128
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class Gate:
    """Wraps the application.

    Args:
        observe: called with (route, method, status, seconds) of each answered request.
        bodies: bounds the bytes of all bodies together.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        max_body: int,
        observe: Callable[[str, str, int, float], None],
        bodies: BodyBudget | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body
        self._observe = observe
        self._bodies = bodies or BodyBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = UNSAFE.sub("", headers.get("x-request-id", ""))[:ID_SIZE]
        scope["trencadis.request_id"] = given
        shown = given or uuid.uuid4().hex
        begun, status = time.monotonic(), 0
        body = scope["trencadis.body"] = self._bodies.open()

        async def out(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = shown
            await send(message)

        try:
            self._check(scope, headers)
            announced = headers.get("content-length", "")
            body.charge(int(announced) if announced.isdecimal() else 0)
            await self._app(scope, self._counted(receive, body), out)
        except ClientGone:
            status = status or CLOSED
        except TrencadisError as error:
            if not status:
                await error_response(error)(scope, receive, out)
        except Exception:
            log.exception("request %s failed", shown)
            if not status:
                await error_response(TrencadisError("Internal server error."))(scope, receive, out)
        finally:
            body.leave()
            route = scope.get("route")
            self._observe(getattr(route, "path", "other"), scope["method"], status, time.monotonic() - begun)

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        self._keys.check(scope["method"], path, headers.get("authorization", ""), headers.get("x-api-key", ""))
        if scope["method"] != "POST":
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and headers.get("content-length", "1") != "0":
            raise BadRequest("Content-Type must be application/json.", param="Content-Type")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            raise self._too_large()

    def _counted(self, receive: Receive, body: Body) -> Receive:
        left, ahead = self._max_body, body.held

        async def counted() -> Message:
            nonlocal left, ahead
            message = await receive()
            size = len(message.get("body", b""))
            left, ahead = left - size, ahead - size
            # Whoever reads a body turns other exceptions into "cannot be parsed".
            if left < 0:
                raise HTTPException(413, self._too_large().message)
            if ahead < 0 and not body.done:
                try:
                    body.charge(-ahead)
                except QueueFull as error:
                    raise HTTPException(429, error.message, {"retry-after": str(error.retry_after)}) from None
                ahead = 0
            return message

        return counted

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The request body exceeds {self._max_body} bytes.")


def error_response(error: TrencadisError, headers: Mapping[str, str] | None = None) -> Response:
    """The envelope with the error's status, and Retry-After where it names one."""
    out = dict(headers or {})
    if error.retry_after is not None:
        out["retry-after"] = str(error.retry_after)
    if error.status == 401:
        out["www-authenticate"] = "Bearer"
    body = ErrorResponse.of(error).model_dump_json()
    return Response(body, error.status, out, media_type="application/json")
