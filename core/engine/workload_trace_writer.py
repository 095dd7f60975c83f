"""Writes the sizes of served requests to a file that ``trencadis plan --trace`` reads (``--record-trace``).

One JSON object a line, in order of arrival: seconds since the first request, tokens of prompt and answer, cached
tokens, and the slots of each image. No text, id, digest or name of a user.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from trencadis.core.errors import StartupError
from trencadis.core.request import Delta, Request

log = logging.getLogger("trencadis.engine")

WAITING = 10_000
"""Ended requests that wait for an earlier one; above it, the earlier one is written as far as it is known."""

MOST_LINE = 64 << 10
"""Bytes at the end of an earlier file in which its last line is looked for."""

MOST_BYTES = 256 << 20
"""A file of this size is not continued."""


@dataclass(slots=True)
class _TracedRequest:
    """A request that runs, or that has ended and waits for earlier ones."""

    arrival: float
    prompt: int
    slots: list[int]
    open: set[int]
    output: dict[int, int] = field(default_factory=dict)
    cached: int = 0

    def lines(self) -> str:
        """Returns a line for each choice; all but the first find the whole prompt in the cache."""
        found = ""
        for index, count in sorted(self.output.items()):
            slots = self.slots if index == 0 else []
            cached = self.cached if index == 0 else self.prompt
            record = {"arrival": self.arrival, "prompt": self.prompt, "output": max(count, 1), "cached": cached}
            found += json.dumps({**record, "slots": slots} if slots else record) + "\n"
        return found


class RequestTrace:
    """The trace of one engine.

    A file from an earlier start is continued after its last arrival.

    Raises:
        StartupError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._requests: dict[str, _TracedRequest] = {}
        self._first: float | None = None
        try:
            _drop_cut_line(path)
            self._last = _last_arrival(path)
            self._file: IO[str] | None = open(  # noqa: SIM115
                path, "a", encoding="utf-8", buffering=1 << 16, opener=lambda name, flags: os.open(name, flags, 0o600)
            )
        except OSError as error:
            raise StartupError(f"--record-trace {path}: {error.strerror}.") from None

    def begin(self, request: Request, now: float) -> None:
        """Notes the arrival of a request; ``now`` in seconds of any clock."""
        if self._file is None:
            return
        if self._first is None:
            self._first = now - self._last
        arrival = round(now - self._first, 1)
        slots = [span.slots for span in request.spans]
        choices = set(range(request.params.n))
        self._requests[request.id] = _TracedRequest(arrival, len(request.tokens), slots, choices)

    def take(self, deltas: Sequence[Delta]) -> None:
        """Notes what a step has added to its requests."""
        for delta in deltas:
            known = self._requests.get(delta.id)
            if known is None:
                continue
            known.output[delta.choice] = known.output.get(delta.choice, 0) + len(delta.tokens)
            known.cached = max(known.cached, delta.cached_tokens)
            if delta.finish is not None:
                known.open.discard(delta.choice)
                if delta.finish == "error":
                    known.output.pop(delta.choice)
        self._write()

    def _write(self, everything: bool = False) -> None:
        """Writes the ended requests that no earlier one precedes."""
        while self._requests and self._file is not None:
            name, first = next(iter(self._requests.items()))
            if first.open and not everything and len(self._requests) <= WAITING:
                return
            del self._requests[name]
            try:
                self._file.write(first.lines())
                if self._file.tell() > MOST_BYTES:
                    raise OSError(0, f"larger than {MOST_BYTES >> 20} MiB")
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        """Stops recording."""
        log.warning("--record-trace %s ends here: %s", self._path, error.strerror)
        self._file = None
        self._requests.clear()

    def close(self) -> None:
        """Writes what is left; a request that still runs counts with what it has so far."""
        self._write(everything=True)
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._end(error)


def _drop_cut_line(path: str) -> None:
    """Drops a last line without an end, which a process that was killed has left."""
    file = Path(path)
    if not file.is_file() or not file.stat().st_size:
        return
    with file.open("rb+") as data:
        begin = max(file.stat().st_size - MOST_LINE, 0)
        data.seek(begin)
        tail = data.read()
        whole = tail.rfind(b"\n") + 1
        if whole < len(tail) and tail[whole:].startswith(b'{"arrival"'):
            data.truncate(begin + whole)


def _last_arrival(path: str) -> float:
    """Returns the last arrival of an earlier trace, 0.0 if there is none.

    Raises:
        StartupError: the file is no trace.
    """
    file = Path(path)
    if not file.exists() or not file.stat().st_size:
        return 0.0
    with file.open("rb") as data:
        data.seek(max(file.stat().st_size - MOST_LINE, 0))
        lines = data.read().splitlines()
    if not lines:
        return 0.0
    try:
        return float(json.loads(lines[-1])["arrival"])
    except (ValueError, KeyError, TypeError):
        raise StartupError(f"--record-trace {path}: the file is no trace.") from None
