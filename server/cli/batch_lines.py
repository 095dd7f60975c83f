"""Lines of batch files in OpenAI's format: requests are read, and one output line is written for each.

The output file: one line for each line of the input, in the same order, so that it also records a run's progress.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import msgspec

from trencadis.core.errors import StartupError
from trencadis.core.json_types import JsonObject

ROUTES = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
        "/v1/embeddings", "/pooling", "/classify",
        "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        "/tokenize", "/detokenize", "/invocations",
    )
)  # fmt: skip
"""Values of ``url``: the routes that take one request and give one answer."""
BOM = b"\xef\xbb\xbf"
PIECE = 1 << 20
_PLAIN = (b"false", b"null")


class BatchLine(msgspec.Struct):
    """A request of a batch file; ``body`` is kept as raw JSON."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Streamed(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"false")


_LINE = msgspec.json.Decoder(BatchLine)
_NAMED = msgspec.json.Decoder(_Named)
_STREAMED = msgspec.json.Decoder(_Streamed)
_ANY = msgspec.json.Decoder(msgspec.Raw)


class BadLine(Exception):
    """A line that is not a valid request; the run goes on with an error line in its place."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


def find_custom_id(data: bytes) -> str | None:
    """Returns the ``custom_id`` of a line; None if it has none that can be read."""
    try:
        return _NAMED.decode(data).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def read_line(data: bytes) -> BatchLine:
    """Parses the request of a line.

    Raises:
        BadLine: the line is no request, or one that a batch cannot answer.
    """
    name = find_custom_id(data)
    try:
        line = _LINE.decode(data)
        stream = bytes(_STREAMED.decode(line.body).stream)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request_line", f"{error}", name) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadLine("invalid_json_line", f"This line is not valid JSON: {error}.", name) from None
    if line.method != "POST":
        raise BadLine("invalid_method", f"method must be POST, not {line.method[:20]!r}.", name)
    if line.url not in ROUTES:
        known = ", ".join(sorted(ROUTES))
        raise BadLine("invalid_url", f"url {line.url[:80]!r} is none of {known}.", name)
    if stream not in _PLAIN:
        raise BadLine("invalid_request_line", "A request of a batch cannot be streamed: leave out stream.", name)
    return line


def make_answer_line(custom_id: str, status: int, content: bytes, request_id: str) -> tuple[bytes, bool]:
    """Returns the output line of an answer with JSON ``content``, and True if it is a success.

    An HTTP error is written in ``response``, as by OpenAI, and also in ``error``, where clients of vLLM read it.
    """
    if b"\n" in content or b"\r" in content:
        content = msgspec.json.format(content, indent=-1)
    body = _ANY.decode(content)
    good = 200 <= status < 300
    response = {"status_code": status, "request_id": request_id, "body": body}
    error: _LineError | None = (
        None if good else {"code": _get_error_code(content), "message": _get_error_message(content, status)}
    )
    return _encode_line(custom_id, response, error), good


def make_error_line(custom_id: str | None, code: str, message: str) -> bytes:
    """Returns the output line of a request that got no answer."""
    return _encode_line(custom_id, None, {"code": code, "message": message})


class _LineError(TypedDict):
    """Why a line has no good answer."""

    code: str
    message: str


def _encode_line(custom_id: str | None, response: JsonObject | None, error: _LineError | None) -> bytes:
    made = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(made) + b"\n"


def _get_error_object(content: bytes) -> JsonObject:
    """Returns the ``error`` object of an error's body; empty if the body has another form."""
    found = msgspec.json.decode(content)
    error = found.get("error", found) if isinstance(found, dict) else {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _get_error_code(content: bytes) -> str:
    error = _get_error_object(content)
    return str(error.get("type") or error.get("code") or "error")


def _get_error_message(content: bytes, status: int) -> str:
    return str(_get_error_object(content).get("message") or f"The server answered {status}.")


class LineReader:
    """Iterates over the lines of a file that are not blank; at most ``limit`` bytes of a line are held.

    Raises:
        StartupError: the file cannot be opened.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.bytes_read = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}.") from None

    def __iter__(self) -> Iterator[bytes | None]:
        """Yields lines without their ends; None for a line that is too long."""
        with self._file as file:
            while piece := file.readline(self.limit + 1):
                whole = piece.endswith(b"\n") or len(piece) <= self.limit
                self.bytes_read += len(piece)
                if not whole:
                    while piece and not piece.endswith(b"\n"):
                        piece = file.readline(PIECE)
                        self.bytes_read += len(piece)
                    yield None
                    continue
                line = piece.removeprefix(BOM).strip()
                if line:
                    yield line


def count(path: Path) -> int:
    """Returns the number of lines of a file that are not blank."""
    found, open_line = 0, False
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            parts = piece.split(b"\n")
            for i, part in enumerate(parts):
                open_line = open_line or bool(part.strip())
                if i < len(parts) - 1:
                    found += open_line
                    open_line = False
    return found + open_line


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None


_WRITTEN = msgspec.json.Decoder(_Written)


class ResultFile:
    """Writes lines in the order of their numbers; those that come early wait in memory. Every line is written to the
    system at once, so a process that is killed leaves whole lines and at most one incomplete one, which ``resume`` cuts
    off.

    Args:
        resume: keep the lines that the file has.

    Raises:
        StartupError: the file cannot be written.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        self.path = path
        self.next = 0
        """Number of the line that is written next."""
        self.early: dict[int, bytes] = {}
        self.early_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
        try:
            self._fd = os.open(path, flags, 0o666)
            self._end = _cut_torn_line(self._fd) if resume else 0
            os.lseek(self._fd, self._end, os.SEEK_SET)
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}.") from None

    def read_custom_ids(self) -> Iterator[str | None]:
        """Yields the ``custom_id`` of each line that the file had; afterwards ``next`` is the number of lines.

        Raises:
            StartupError: a line is not a batch's output.
        """
        if not self._end:
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    found = _WRITTEN.decode(line)
                except msgspec.MsgspecError:
                    where = f"line {self.next + 1} of {self.path}"
                    raise StartupError(
                        f"{where} is no line of a batch's output; --resume cannot go on there."
                    ) from None
                self.next += 1
                yield found.custom_id

    def write(self, number: int, line: bytes) -> None:
        """Writes a line once all lines before it are written.

        Raises:
            OSError: it cannot be written, for example because the disk is full.
        """
        self.early[number] = line
        self.early_bytes += len(line)
        while (found := self.early.pop(self.next, None)) is not None:
            self.early_bytes -= len(found)
            self.next += 1
            left = memoryview(found)
            while left:
                left = left[os.write(self._fd, left) :]

    def close(self, sync: bool = True) -> None:
        """Closes the file; ``sync`` waits until it is on the disk."""
        if sync and os.path.isfile(self.path):
            os.fsync(self._fd)
        os.close(self._fd)


def _cut_torn_line(fd: int) -> int:
    """Cuts off a last line without an end; returns the size of the file after that."""
    end = os.lseek(fd, 0, os.SEEK_END)
    at = end
    while at:
        begin = max(0, at - PIECE)
        found = os.pread(fd, at - begin, begin).rfind(b"\n")
        if found >= 0:
            at = begin + found + 1
            break
        at = begin
    if at < end:
        os.ftruncate(fd, at)
    return at
