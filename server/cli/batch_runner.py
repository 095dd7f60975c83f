"""Runs the lines of a batch: many at a time, in bounded memory, with the answers in the input's order.

Progress of a batch: a bar on a terminal, otherwise a log line now and then.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import httpx
import msgspec

from trencadis.core.errors import StartupError
from trencadis.server.cli import batch_lines
from trencadis.server.cli.batch_lines import BadLine, BatchLine, LineReader, ResultFile

log = logging.getLogger("trencadis.server")
LINE_EVERY = 30.0


class BatchProgress:
    """Counts answers.

    Args:
        total: lines of the input.
        bar: show a bar if there is a terminal.
    """

    def __init__(self, total: int, bar: bool = True) -> None:
        self.total, self.done, self.before, self.failed = total, 0, 0, 0
        self._begun = self._said = time.monotonic()
        self._wanted = bar and sys.stderr.isatty()
        self._bar: Any = None

    def begin(self, done: int) -> None:
        """Starts the clock; ``done`` lines were answered by an earlier run."""
        self.done = self.before = done
        self._begun = self._said = time.monotonic()
        if self._wanted:
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, initial=done, desc="Running batch", unit="req", dynamic_ncols=True)

    def add_answer(self, good: bool) -> None:
        """Counts one more answered line."""
        self.done += 1
        self.failed += not good
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.failed} failed" if self.failed else "", refresh=False)
            self._bar.update(1)
        elif time.monotonic() - self._said >= LINE_EVERY:
            self._said = time.monotonic()
            log.info("%s", self.format_line())

    def format_line(self) -> str:
        """Returns the progress in one line."""
        seconds = max(time.monotonic() - self._begun, 1e-6)
        rate = (self.done - self.before) / seconds
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate and self.total > self.done else ""
        return f"batch: {self.done} of {self.total} lines, {self.failed} failed, {rate:.1f}/s{left}"

    def close(self) -> None:
        """Ends the progress bar."""
        if self._bar is not None:
            self._bar.close()


BUSY = 429
GONE = (502, 503, 504)
"""Statuses of a server, or of a proxy before it, without an engine."""
TRIES = 3
"""Most failures of a request together with its server, so that one that ends the engine is not repeated for ever."""
LONGEST_PAUSE = 30.0
BUSY_SECONDS = 3600.0
"""Maximum seconds for which a request is delayed by 429."""


class BatchTarget(Protocol):
    """The server that requests are sent to."""

    client: httpx.AsyncClient

    async def wait_ready(self) -> None:
        """Waits until requests can be answered.

        Raises:
            StartupError: the server will not be ready.
        """
        ...


@dataclass(frozen=True)
class BatchLimits:
    """Limits of what may be in memory.

    Args:
        running: requests that run at a time.
        window: lines between the oldest unanswered one and the newest that is read.
        request_bytes: total bytes of the running requests' bodies; a larger body runs alone.
        answer_bytes: bytes of answers that wait for an earlier one.
        longest: maximum bytes of a line.
    """

    running: int = 256
    window: int = 4096
    request_bytes: int = 32 << 20
    answer_bytes: int = 32 << 20
    longest: int = 64 << 20


class _NumberedLine(NamedTuple):
    """A line of the input: its number, its request or what is wrong with it, and its bytes."""

    number: int
    line: BatchLine | BadLine
    size: int


class BatchRunner:
    """Reads requests, sends them and writes the answers. ``run`` may be cancelled: a later run continues after the
    written lines.
    """

    def __init__(
        self,
        target: BatchTarget,
        reader: LineReader,
        results: ResultFile,
        progress: BatchProgress,
        limits: BatchLimits | None = None,
    ) -> None:
        self.target, self.reader, self.results, self.progress = target, reader, results, progress
        self.limits = limits or BatchLimits()
        self.running = 0
        self.held = 0
        """Bytes of running requests."""
        self.first_error = ""
        self._lines = iter(reader)
        self._ids: set[bytes] = set()
        self._ended = asyncio.Event()
        self._ready = asyncio.Lock()

    def skip_written(self) -> None:
        """Skips the input lines that the output already has.

        Raises:
            StartupError: the output was not made from this input.
        """
        for found in self.results.read_custom_ids():
            number = self.results.next
            line = next(self._lines, b"")
            own = batch_lines.find_custom_id(line) if line else None
            if line == b"" or own != found:
                what = f"line {number} of {self.results.path} is about {found!r}, line {number} of the input"
                says = "is not there" if line == b"" else f"about {own!r}"
                raise StartupError(f"{what} {says}: --resume needs the input that the output was made from.")
            self._is_duplicate_id(own)

    def _is_duplicate_id(self, custom_id: str | None) -> bool:
        """Returns True if an earlier line had this id; remembers it by a digest, since a batch may have millions."""
        if custom_id is None:
            return False
        digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
        if digest in self._ids:
            return True
        self._ids.add(digest)
        return False

    async def run(self) -> None:
        """Answers every remaining line.

        Raises:
            StartupError: the server does not come back.
            OSError: the output cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number, line, size in self._read_requests():
                    await self._wait_for_memory(number, size)
                    if isinstance(line, BadLine):
                        self._write_result(
                            number, batch_lines.make_error_line(line.custom_id, line.code, line.message), line.message
                        )
                        continue
                    self.running += 1
                    self.held += size
                    group.create_task(self._run_line(number, line, size))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _read_requests(self) -> Iterator[_NumberedLine]:
        """Yields the request of each line."""
        for number, data in enumerate(self._lines, self.results.next):
            if data is None:
                bad = BadLine("line_too_long", f"This line has more than {self.limits.longest} bytes.")
                yield _NumberedLine(number, bad, 0)
                continue
            line: BatchLine | BadLine
            try:
                line = batch_lines.read_line(data)
            except BadLine as error:
                line = error
            if self._is_duplicate_id(line.custom_id):
                line = BadLine("duplicate_custom_id", "An earlier line has this custom_id.", line.custom_id)
            yield _NumberedLine(number, line, len(data))

    async def _wait_for_memory(self, number: int, size: int) -> None:
        """Waits until another line may be in memory. The oldest line always runs, so the wait ends."""
        limits = self.limits
        while self.running and (
            self.running >= limits.running
            or self.held + size > limits.request_bytes
            or number - self.results.next >= limits.window
            or self.results.early_bytes > limits.answer_bytes
        ):
            self._ended.clear()
            await self._ended.wait()

    async def _run_line(self, number: int, line: BatchLine, size: int) -> None:
        try:
            written, why = await self._answer(line)
            self._write_result(number, written, why)
        finally:
            self.running -= 1
            self.held -= size
            self._ended.set()

    def _write_result(self, number: int, written: bytes, why: str) -> None:
        self.first_error = self.first_error or (f"line {number + 1}: {why}" if why else "")
        self.results.write(number, written)
        self.progress.add_answer(not why)

    async def _answer(self, line: BatchLine) -> tuple[bytes, str]:
        """Returns the output line, and the error, if there is one.

        Raises:
            StartupError: the server does not come back.
        """
        failures, kept_back = 0, 0.0
        while True:
            pause = min(LONGEST_PAUSE, 0.5 * 2**failures) * random.uniform(0.5, 1.0)
            try:
                response = await self.target.client.post(
                    line.url, content=bytes(line.body), headers={"content-type": "application/json"}
                )
            except httpx.TransportError as error:
                why = f"The connection to the server failed ({type(error).__name__})."
                if failures + 1 >= TRIES:
                    return batch_lines.make_error_line(line.custom_id, "connection_error", why), why
            else:
                status = response.status_code
                if status == BUSY and kept_back < BUSY_SECONDS:
                    pause = min(_parse_retry_after(response.headers.get("retry-after", ""), pause), LONGEST_PAUSE)
                    kept_back += pause
                    await asyncio.sleep(pause)
                    continue
                if status not in GONE or failures + 1 >= TRIES:
                    return self._finish(line, response)
            failures += 1
            await asyncio.sleep(pause)
            async with self._ready:
                await self.target.wait_ready()

    def _finish(self, line: BatchLine, response: httpx.Response) -> tuple[bytes, str]:
        try:
            written, good = batch_lines.make_answer_line(
                line.custom_id, response.status_code, response.content, response.headers.get("x-request-id", "")
            )
        except (msgspec.MsgspecError, UnicodeDecodeError):
            why = f"The server answered {response.status_code} with a body that is no JSON."
            return batch_lines.make_error_line(line.custom_id, "invalid_response", why), why
        return written, "" if good else f"the server answered {response.status_code}"


def _parse_retry_after(text: str, otherwise: float) -> float:
    """Returns the seconds of a Retry-After header; ``otherwise`` for a date or no header."""
    return float(text) if text.isascii() and text.isdecimal() else otherwise
