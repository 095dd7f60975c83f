"""Typed errors for clients, each with an HTTP status, a short message and the parameter at fault; texts of errors.

Out-of-memory errors are recognised by their text, because each backend raises its own types.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
"""Characters that a terminal or a reader of lines takes for something else than text."""

MAX_MESSAGE = 199
"""Longest message sent to a client, in characters."""

MAX_LINE = 2000
"""Longest line of an error that ends the start, in characters."""


class TrencadisError(Exception):
    """Base class of all errors that are reported to users.

    Args:
        message: one short sentence; cut to ``MAX_MESSAGE`` characters.
        param: the request field at fault, such as ``messages[0].content[1]``; cut in the same way.
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
    """Returns ``text`` cut to ``MAX_MESSAGE``, with lone surrogates escaped, which UTF-8 cannot encode."""
    return text[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()[:MAX_MESSAGE]


class BadRequest(TrencadisError):
    """400: the request is invalid."""

    status = 400
    type = "BadRequestError"


class Unauthorized(TrencadisError):
    """401: the API key is missing or wrong."""

    status = 401
    type = "AuthenticationError"


class Forbidden(TrencadisError):
    """403: forbidden by the operator's rules (an address, a path, a disabled feature)."""

    status = 403
    type = "PermissionDeniedError"


class NotFound(TrencadisError):
    """404: no such model, route or object."""

    status = 404
    type = "NotFoundError"


class RequestTimeout(TrencadisError):
    """408: the request was not received in time."""

    status = 408
    type = "RequestTimeoutError"


class Conflict(TrencadisError):
    """409: the request conflicts with the server's current state."""

    status = 409
    type = "ConflictError"


class TooLarge(TrencadisError):
    """413: too many bytes or pixels."""

    status = 413
    type = "RequestTooLargeError"


class UnsupportedMedia(TrencadisError):
    """415: the bytes are no image of a known format."""

    status = 415
    type = "UnsupportedMediaTypeError"


class Unprocessable(TrencadisError):
    """422: a media URL could not be fetched."""

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
    """429: a limit of the client's API key is reached, regardless of the server's load."""


class Unavailable(TrencadisError):
    """503: the server is loading or draining, or the engine has died."""

    status = 503
    type = "ServiceUnavailableError"


class DeadlineExceeded(TrencadisError):
    """504: the request has exceeded its time limit, set by itself or by the operator."""

    status = 504
    type = "GatewayTimeoutError"


class StartupError(Exception):
    """Ends the start-up with one line for the terminal and exit code 2.

    Line feeds and other control characters become spaces: a checkpoint's names stand in such lines, and must not forge
    others or move the cursor. The middle of a line longer than ``MAX_LINE`` is left out: its end tells the reason.
    """

    def __init__(self, message: str = "") -> None:
        line = CONTROL.sub(" ", message)
        if len(line) > MAX_LINE:
            line = f"{line[: MAX_LINE // 2]} … {line[3 - MAX_LINE // 2 :]}"
        super().__init__(line.encode("utf-8", "backslashreplace").decode())


class FilesNotFound(StartupError):
    """Raised if there is no such folder or hub repository, or nothing of the asked kind in it."""


BY_STATUS: dict[int, type[TrencadisError]] = {
    c.status: c
    for c in (
        BadRequest, Unauthorized, Forbidden, NotFound, RequestTimeout, Conflict, TooLarge,
        UnsupportedMedia, Unprocessable, QueueFull, Unavailable, DeadlineExceeded, TrencadisError,
    )
}  # fmt: skip


def from_status(status: int, message: str, param: str | None = None) -> TrencadisError:
    """Returns the error for an HTTP ``status``, as decoded from a message of another process."""
    return BY_STATUS.get(status, TrencadisError)(message, param=param)


OOM_PHRASES = (
    "out of memory", "outofdevicememory", "allocation failed", "alloc failed", "failed to allocate",
    "not enough memory", "no enough memory", "workspace allocation of size",
)  # fmt: skip
"""Phrases in lower case. Underscores in the error text, as in names of status codes, count as spaces."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error means that the device ran out of memory."""
    text = f"{type(error).__name__} {error}".lower().replace("outofmemory", "out of memory").replace("_", " ")
    return isinstance(error, MemoryError) or any(s in text for s in OOM_PHRASES)


def format_error(error: BaseException) -> str:
    """Returns an error as one short line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextmanager
def attach_param(param: str | None) -> Iterator[None]:
    """Sets ``param``, a request field, on every TrencadisError raised in the block that has none."""
    try:
        yield
    except TrencadisError as error:
        if param is None or error.param is not None:
            raise
        raise type(error)(error.message, param=param, retry_after=error.retry_after) from None


LONGEST = 200
"""Most characters of a name that is compared: the time grows with their square."""

LIKE = 0.75
"""Minimum similarity of a word and its misspelling, from 0 to 1."""


def suggest_name(written: str, names: Iterable[str]) -> str:
    """Returns the name whose words are those of ``written``, possibly misspelt or cut short; "" if there is none.

    Names are compared word by word: as a whole, --max-lora-rank shares more letters with --max-log-len than many a typo
    with the intended name. If two or more words are written, one may be missing.
    """
    if len(written) > LONGEST:
        return ""
    words = _words(written)
    found = [(score, name) for name in names if (score := _alike(words, _words(name)))]
    return max(found)[1] if found else ""


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_]+", name.lower()) if word]


def _alike(written: list[str], known: list[str]) -> float:
    """Returns the similarity of two names from 0 (different) to 1."""
    if len(written) == len(known):
        each = [_word(a, b) for a, b in zip(written, known, strict=True)]
        alike = bool(each) and all(each) and (len(each) == 1 or 1 in each)
        return sum(each) / len(each) if alike else 0
    if 2 <= len(written) == len(known) - 1:
        return max(_cut(written, known[:i] + known[i + 1 :]) for i in range(len(known)))
    return 0


def _cut(written: list[str], rest: list[str]) -> float:
    """Returns the similarity if one of the known words is missing; each other word must be equal or cut short."""
    pairs = list(zip(written, rest, strict=True))
    return sum(_word(a, b) for a, b in pairs) / (len(rest) + 1) if all(_short(a, b) for a, b in pairs) else 0


def _short(written: str, known: str) -> bool:
    """Returns True if the words are equal, or one is the beginning of the other."""
    less, more = sorted((written, known), key=len)
    return written == known or (len(less) > 2 and more.startswith(less))


def _word(written: str, known: str) -> float:
    if written == known:
        return 1
    ratio = difflib.SequenceMatcher(None, written, known).ratio()
    return max(ratio, LIKE) if _short(written, known) else ratio if ratio >= LIKE else 0
