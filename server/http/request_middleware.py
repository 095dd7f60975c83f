"""The outermost ASGI middleware: request ids, API keys, content type, body size and rate, error envelopes.

Time limit of a request: the operator's, or a shorter one that the client requests.

Paths of OpenAI's API that this server does not have, with the reason that it answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.core.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    HeadersTooLarge,
    QueueFull,
    TooLarge,
    TrencadisError,
    Unavailable,
)
from trencadis.server.metrics.request_record_logs_and_metrics import CLIENT_CLOSED, RECORD, RequestRecord, log_access
from trencadis.server.protocol.base_request import ErrorResponse, is_anthropic_path
from trencadis.server.routes import anthropic_conversion, app_state
from trencadis.server.routes.api_keys_and_allowed_hosts import UNSAFE, HostRules, Keys
from trencadis.server.routes.sse import ClientGone
from trencadis.server.tenants.server_admission_and_byte_budgets import BodyBudget, BodyCharge
from trencadis.server.tenants.tenant_registry import CURRENT

RUNTIME_REASON = "adapters change at run time only with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
WHY = {
    "/v1/audio": "it reads and writes no audio",
    "/v1/realtime": "it reads and writes no audio",
    "/v1/images": "it reads images and makes none",
    "/v1/videos": "it reads videos and makes none",
    "/v1/moderations": "it has no moderation model",
    "/v1/files": "it keeps no files; media travel in the request",
    "/v1/uploads": "it keeps no files; media travel in the request",
    "/v1/batches": "it keeps no batches; /v1/chat/completions/batch takes several conversations at a time",
    "/v1/fine_tuning": "it does not train",
    "/v1/assistants": "it keeps no state",
    "/v1/threads": "it keeps no state",
    "/v1/vector_stores": "it keeps no files",
    "/v1/load_lora_adapter": RUNTIME_REASON,
    "/v1/unload_lora_adapter": RUNTIME_REASON,
}


def get_reason(path: str) -> str:
    """Returns why this server lacks a path of OpenAI's; empty for any other path."""
    return next((why for start, why in WHY.items() if path == start or path.startswith(start + "/")), "")


def describe_missing_path(path: str) -> str:
    """Returns one line for a path that does not exist."""
    shown, why = path[:80], get_reason(path)
    if not why:
        return f"No such path: {shown}"
    return f"This server has no {shown}: {why}. It serves chat and completions (GET /v1/models says of what)."


HEADER = "x-request-timeout"
TIMEOUT_MESSAGE = "The request did not end within its {:g} seconds."


def get_timeout(headers: Headers, most: float) -> float:
    """Returns the seconds that a request may take; 0: no limit.

    Args:
        most: the operator's limit; 0: none.

    Raises:
        BadRequest: the header is not a positive number.
    """
    written = headers.get(HEADER)
    if written is None:
        return most
    try:
        asked = float(written)
    except ValueError:
        asked = math.nan
    if not 0 < asked < math.inf:
        raise BadRequest(f"{HEADER} must be a positive number of seconds.", param=HEADER)
    return min(asked, most) if most else asked


async def run_within(record: RequestRecord, seconds: float, work: Awaitable[None]) -> None:
    """Waits for ``work``, which is cancelled if its answer has not begun in time; a stream checks the deadline itself.

    Args:
        seconds: limit, counted from the request's arrival.

    Raises:
        DeadlineExceeded: the limit is exceeded, and nothing has been sent.
    """
    record.deadline = record.begun + seconds
    timer = record.timer = asyncio.timeout_at(record.deadline)
    try:
        async with timer:
            await work
    except TimeoutError:
        if not timer.expired():
            raise
        raise DeadlineExceeded(TIMEOUT_MESSAGE.format(seconds)) from None
    finally:
        record.timer = None


def stop_timer(record: RequestRecord) -> None:
    """Stops the request's timer: after the status line has been sent a timeout can no longer change it."""
    if record.timer is not None and not record.timer.expired():
        record.timer.reschedule(None)


log = logging.getLogger("trencadis.server")
ID_SIZE = 128
DIGITS = 18
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Methods that have their own label in metrics. Clients may send any word, and each would add a permanent series."""
TRACE_HEADERS = ("traceparent", "tracestate")
TOO_LARGE = "The request body exceeds {} bytes."
LATE = "The request body did not arrive within {:g} s, or arrives too slowly."
MIN_BYTES_PER_SECOND = 1024
"""Bytes a second that a body must deliver on average, over each period of ``receive_timeout``."""


class RequestMiddleware:
    """Wraps the application.

    Args:
        observe: called with (route, method, status, seconds, bytes received, bytes sent) of each answered request.
        bodies: limits the total bytes of all bodies.
        receive_timeout: seconds of a period in which a body must deliver ``MIN_BYTES_PER_SECOND`` bytes a second; 0: no
        limit.
        request_timeout: seconds that a request may take; 0: no limit.
        most_headers: maximum header fields of a request.
        ended: called with the record of each request.
        host_rules: which Host and Origin headers are allowed.
        count_refusal: called with (status, reason) of each request that is refused for its head or size.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        max_body: int,
        observe: Callable[[str, str, int, float, int, int], None],
        bodies: BodyBudget | None = None,
        receive_timeout: float = 0.0,
        request_timeout: float = 0.0,
        most_headers: int = 256,
        ended: Callable[[RequestRecord], None] = lambda record: None,
        load: Callable[[str], Mapping[str, str]] = lambda asked: {},
        host_rules: HostRules | None = None,
        count_refusal: Callable[[int, str], None] = lambda status, reason: None,
    ) -> None:
        self._app = app
        self._request_timeout = request_timeout
        self._most_headers = most_headers
        self._ended = ended
        self._load = load
        self._host_rules = host_rules or HostRules()
        self._count_refusal = count_refusal
        self._keys = keys
        self._max_body = max_body
        self._observe = observe
        self._bodies = bodies or BodyBudget()
        self._receive_timeout = receive_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; other scopes are passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        strip_kept_prefix(scope)
        headers = Headers(scope=scope)
        given = UNSAFE.sub("", headers.get("x-request-id", ""))[:ID_SIZE]
        shown = scope["trencadis.request_id.shown"] = given or uuid.uuid4().hex
        record = scope["trencadis.record"] = make_record(scope, headers, shown)
        RECORD.set(record)
        body = scope["trencadis.body"] = self._bodies.open()

        async def out(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status, record.answered = message["status"], time.monotonic()
                stop_timer(record)
                log_access(record, scope.get("http_version", ""))
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = shown
                if is_anthropic_path(get_path(scope)):
                    sent["request-id"] = shown
                account = CURRENT.get()
                if account is not None:
                    sent.update(dict(account.make_headers()))
                if record.runs_model and app_state.LOAD_FORMAT_HEADER in headers:
                    sent.update(self._load(headers[app_state.LOAD_FORMAT_HEADER]))
            else:
                record.sent += len(message.get("body", b""))
            await send(message)

        try:
            announced = self._check_headers(scope, headers)
            account = CURRENT.get()
            record.tenant = "" if account is None else account.tenant.name
            # An announced size takes no memory yet: refuse what cannot fit, but charge nothing.
            body.check_free(announced)
            timed = scope["method"] == "POST" and (self._request_timeout or HEADER in headers)
            seconds = get_timeout(headers, self._request_timeout) if timed else 0.0
            work = self._app(scope, BodyReceiver(receive, body, self._max_body, self._receive_timeout), out)
            await (run_within(record, seconds, work) if seconds else work)
        except (Exception, asyncio.CancelledError) as error:
            answer = _make_client_error(error, record)
            if answer is not None and not record.status:
                await make_error_response(answer, scope)(scope, receive, out)
        finally:
            body.leave()
            self._close_record(record, scope, body.received)

    def _close_record(self, record: RequestRecord, scope: Scope, received: int) -> None:
        """Completes the record and passes it to its observers."""
        record.end = time.monotonic()
        if not record.status:
            record.status, record.answered = CLIENT_CLOSED, record.end
            log_access(record, scope.get("http_version", ""))
        method = record.method if record.method in METHODS else "other"
        path, seconds = getattr(scope.get("route"), "path", "other"), record.end - record.begun
        self._observe(path, method, record.status, seconds, received, record.sent)
        self._ended(record)

    def _check_headers(self, scope: Scope, headers: Headers) -> int:
        """Checks key, size and content type in the headers; returns the announced size of the body."""
        if len(headers) > self._most_headers:
            self._count_refusal(431, "fields")
            raise HeadersTooLarge(f"The request has more than {self._most_headers} header fields.")
        authorization, x_api_key = headers.get("authorization", ""), headers.get("x-api-key", "")
        path = get_path(scope)
        self._check_sender(scope["method"], headers)
        scope["trencadis.tenant"] = self._keys.check(scope["method"], path, authorization, x_api_key)
        length = headers.get("content-length", "")
        # int() raises its own error for thousands of digits.
        if length.isdecimal() and (len(length) > DIGITS or int(length) > self._max_body):
            self._count_refusal(413, "body")
            raise TooLarge(TOO_LARGE.format(self._max_body))
        if scope["method"] == "POST" and headers.get("content-type") != "application/json":
            _check_type(headers, length, path)
        return int(length) if length.isdecimal() else 0

    def _check_sender(self, method: str, headers: Headers) -> None:
        """Raises Forbidden if the host or the page that sent the request is not allowed."""
        reason = "host"
        try:
            self._host_rules.check_host(headers)
            reason = "origin"
            self._host_rules.check_origin(method, headers)
        except Forbidden:
            self._count_refusal(403, reason)
            raise


def _check_type(headers: Headers, length: str, path: str) -> None:
    """Raises BadRequest for a body that is not JSON; paths that take forms at OpenAI are a 404 here."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    empty = length == "0" or not (length or "transfer-encoding" in headers)
    if kind != "application/json" and not empty and not get_reason(path):
        raise BadRequest("Content-Type must be application/json.", param="Content-Type")


def _make_client_error(error: BaseException, record: RequestRecord) -> TrencadisError | None:
    """The error to send for an exception that ended a request; None if the client has disconnected."""
    match error:
        case ClientGone() | ClientDisconnect():
            return None  # the second is raised while the body is read
        case TrencadisError():
            return error
        case asyncio.CancelledError():
            # uvicorn cancels requests that run beyond the last deadline of a shutdown.
            return Unavailable("The server is stopping; please retry.")
    log.error("request %s failed", record.id, exc_info=error)
    record.error = TrencadisError.type
    return TrencadisError("Internal server error.")


class BodyReceiver:
    """Wraps ``receive``: charges the bytes of the body and limits its size and time.

    Only time in which the server waits for the client counts.

    Args:
        most: maximum bytes of the body.
        seconds: length of a period, in which ``MIN_BYTES_PER_SECOND`` bytes must arrive for each second; 0: no limit.
    """

    def __init__(self, receive: Receive, body: BodyCharge, most: int, seconds: float) -> None:
        self._receive, self._body, self._most, self._seconds = receive, body, most, seconds
        self._left, self._came, self._more = seconds, 0, True

    async def __call__(self) -> Message:
        """Returns the next message.

        Raises:
            HTTPException: the body is too large (413), late (408), or there is no room for it (429). Starlette reports
                any other exception as a body that cannot be parsed.
        """
        message = await (self._receive_in_time() if self._more and self._seconds else self._receive())
        self._more = bool(message.get("more_body", False))
        size = len(message.get("body", b""))
        self._body.received += size
        if self._body.received > self._most:
            raise HTTPException(413, TOO_LARGE.format(self._most))
        try:
            self._body.charge(size)
        except QueueFull as error:
            raise HTTPException(429, error.message, {"retry-after": str(error.retry_after)}) from None
        return message

    async def _receive_in_time(self) -> Message:
        """Returns the next message of a body; raises if it is too slow."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, LATE.format(self._seconds), {"connection": "close"}) from None
        self._left -= time.monotonic() - begun
        self._came += len(message.get("body", b""))
        if self._came >= self._seconds * MIN_BYTES_PER_SECOND:
            self._left, self._came = self._seconds, 0
        return message


def make_record(scope: Scope, headers: Headers, id: str) -> RequestRecord:
    """Makes the record of a request that has just arrived."""
    client = scope.get("client")
    address = f"{client[0]}:{client[1]}" if client and is_address(client[0]) else ""
    parent = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    rank = headers.get("x-data-parallel-rank", "")
    return RequestRecord(id, scope["method"], get_path(scope), address, parent, rank=rank)


def strip_kept_prefix(scope: Scope) -> None:
    """Removes ``--root-path`` from a path that has it twice: uvicorn adds it, also where a proxy did not strip it."""
    root = scope.get("root_path", "").rstrip("/")
    path: str = scope["path"]
    if root and (path == root + root or path.startswith(f"{root}{root}/")):
        scope["path"] = path[len(root) :]
        scope["raw_path"] = scope.get("raw_path", b"")[len(root.encode()) :]


def is_address(text: str) -> bool:
    """True for an IP address; a proxy may pass on any other text of its client's X-Forwarded-For."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # a zone may hold any character


def get_path(scope: Scope) -> str:
    """Returns the path of a request below ``--root-path``."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path or "/"


def make_error_response(error: TrencadisError, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the error in the format of the API that ``scope`` belongs to, with Retry-After if the error has one."""
    out = dict(headers or {})
    if error.retry_after is not None:
        out["retry-after"] = str(error.retry_after)
    if error.status == 401:
        out["www-authenticate"] = "Bearer"
    if error.status == 504:
        # Official clients would retry, and wait as long again.
        out["x-should-retry"] = "false"
    record = scope.get("trencadis.record")
    if record is not None:
        record.error = error.type
    status, body = error.status, ErrorResponse.from_error(error).model_dump_json()
    if is_anthropic_path(get_path(scope)):
        status = anthropic_conversion.get_status(error)
        body = anthropic_conversion.make_error(error, scope.get("trencadis.request_id.shown")).model_dump_json()
    return Response(body, status, out, media_type="application/json")
