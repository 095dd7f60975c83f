"""Typed errors. Each is a reply to a client: an HTTP status, a short message and the parameter at fault."""

from __future__ import annotations

import re
from typing import ClassVar

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
"""Characters that a terminal or a reader of lines takes for something else than text."""

MAX_MESSAGE = 199
"""Longest message that is sent to a client, in characters."""


class TrencadisError(Exception):
    """Base of all errors that a user sees.

    Args:
        message: one short sentence; cut to ``MAX_MESSAGE`` characters.
        param: the request field it is about, such as ``messages[0].content[1]``; cut likewise.
        retry_after: seconds after which the same request may succeed.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        self.message = _printable(message)
        super().__init__(self.message)
        self.param = None if param is None else _printable(param)
        self.retry_after = retry_after


def _printable(text: str) -> str:
    """``text``, cut, without lone surrogates, which a quoted part of a request may hold and UTF-8 cannot encode."""
    return text[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()[:MAX_MESSAGE]


class BadRequest(TrencadisError):
    """400: the request itself is wrong."""

    status = 400
    type = "BadRequestError"


class Unauthorized(TrencadisError):
    """401: the API key is missing or wrong."""

    status = 401
    type = "AuthenticationError"


class Forbidden(TrencadisError):
    """403: refused by the operator's rules (an address, a path, a disabled feature)."""

    status = 403
    type = "PermissionDeniedError"


class NotFound(TrencadisError):
    """404: no such model, route or object."""

    status = 404
    type = "NotFoundError"


class RequestTimeout(TrencadisError):
    """408: the request did not come in time."""

    status = 408
    type = "RequestTimeoutError"


class Conflict(TrencadisError):
    """409: contradicts what the server already holds."""

    status = 409
    type = "ConflictError"


class TooLarge(TrencadisError):
    """413: too many bytes or pixels."""

    status = 413
    type = "RequestTooLargeError"


class UnsupportedMedia(TrencadisError):
    """415: bytes that are no image of a known format."""

    status = 415
    type = "UnsupportedMediaTypeError"


class Unprocessable(TrencadisError):
    """422: a media URL that did not answer."""

    status = 422
    type = "UnprocessableEntityError"


class HeadersTooLarge(TrencadisError):
    """431: the request has too many header fields."""

    status = 431
    type = "RequestHeadersTooLargeError"


class QueueFull(TrencadisError):
    """429: the bounded queue is full."""

    status = 429
    type = "RateLimitError"


class KeyLimitReached(QueueFull):
    """429 too: a limit of the client's key is reached, however much room the server has."""


class Unavailable(TrencadisError):
    """503: loading, draining, or the engine died."""

    status = 503
    type = "ServiceUnavailableError"


class DeadlineExceeded(TrencadisError):
    """504: the request has used the seconds that it or the operator gives it."""

    status = 504
    type = "GatewayTimeoutError"


class StartupError(Exception):
    """Ends the start-up with one line for the terminal and exit code 2.

    Line feeds and other control characters become spaces: a checkpoint's names stand in such lines, and must not forge
    others or move the cursor.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(CONTROL.sub(" ", message).encode("utf-8", "backslashreplace").decode())


BY_STATUS: dict[int, type[TrencadisError]] = {
    c.status: c
    for c in (
        BadRequest, Unauthorized, Forbidden, NotFound, RequestTimeout, Conflict, TooLarge,
        UnsupportedMedia, Unprocessable, QueueFull, Unavailable, DeadlineExceeded, TrencadisError,
    )
}  # fmt: skip


def from_status(status: int, message: str, param: str | None = None) -> TrencadisError:
    """The error for ``status`` as it came over the wire."""
    return BY_STATUS.get(status, TrencadisError)(message, param=param)
