"""Sends a trace of each request to a collector, from a thread that no request ever waits for.

A request leaves a few numbers in a bounded queue; the thread makes spans of them and sends those. While the collector
is away the queue keeps the latest requests, nothing is made of them, and attempts become rare.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from trencadis.core.errors import StartupError
from trencadis.server.records.record import RequestRecord
from trencadis.server.records.stages import Trace, trace_of

log = logging.getLogger("trencadis.server")
MOST = 2048
"""Requests that wait to be sent; further ones push the oldest out."""
AT_A_TIME = 128
EVERY = 1.0
"""Seconds between two batches."""
LONGEST_PAUSE = 60.0
PATH = "/v1/traces"
FLAG = "--otlp-traces-endpoint"


class Maker(Protocol):
    """Makes spans of traces."""

    def spans(self, traces: Sequence[Trace]) -> Sequence[Any]:
        """The spans."""
        ...


class Sender(Protocol):
    """Sends spans."""

    def send(self, spans: Sequence[Any]) -> bool:
        """Whether the collector took them."""
        ...


class Traces:
    """The queue and its thread, which starts with the first request.

    Args:
        open: makes the two halves of the library; called in the thread.
    """

    def __init__(self, endpoint: str, open: Callable[[], tuple[Maker, Sender]], every: float = EVERY) -> None:
        self.endpoint = endpoint
        self.dropped = 0
        self._open, self._every = open, every
        self._waiting: deque[Trace] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False

    @classmethod
    def to(cls, endpoint: str) -> Traces:
        """Traces for the collector at ``endpoint``.

        Raises:
            StartupError: it is no URL of OTLP/HTTP, or the extra ``otel`` is not installed.
        """
        url = collector_url(endpoint)
        try:
            spans = importlib.import_module("trencadis.server.records.spans")
        except ImportError:
            raise StartupError(f"{FLAG} needs OpenTelemetry: pip install 'trencadis[otel]'.") from None
        # One line of ours says that a collector fails; the library has several for each attempt.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        return cls(url, lambda: (spans.SpanMaker(), spans.SpanSender(url)))

    def add(self, record: RequestRecord) -> None:
        """Queues the trace of a request that has ended."""
        if len(self._waiting) >= MOST:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(trace_of(record))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Sends what waits, for ``seconds`` at most; a thread that waits for its collector ends with the process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)
        if self._waiting or self.dropped:
            log.warning("%d traces were not sent to %s", len(self._waiting) + self.dropped, self.endpoint)

    def _run(self) -> None:
        maker, sender = self._open()
        pause = self._every
        while True:
            stopping = self._stop.wait(pause)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_A_TIME))]
            taken = not batch or self._send(maker, sender, batch)
            if taken:
                pause = 0.0 if len(self._waiting) >= AT_A_TIME else self._every
            else:
                kept = batch[len(batch) - min(len(batch), MOST - len(self._waiting)) :]
                self.dropped += len(batch) - len(kept)
                self._waiting.extendleft(reversed(kept))
                pause = min(max(2 * pause, self._every), LONGEST_PAUSE)
            if stopping and not (taken and self._waiting):
                return

    def _send(self, maker: Maker, sender: Sender, batch: Sequence[Trace]) -> bool:
        try:
            spans = maker.spans(batch)
            taken = not spans or sender.send(spans)
        except Exception as error:  # a library's mistake must not end the thread
            log.debug("traces: %r", error)
            taken = False
        if taken == self._failing:
            self._failing = not taken
            if taken:
                log.info("%s takes traces again", self.endpoint)
            else:
                log.warning("%s takes no traces; the latest %d requests wait for it", self.endpoint, MOST)
        return taken


def collector_url(endpoint: str) -> str:
    """The URL to which traces are posted: ``endpoint``, with OTLP's usual path where it has none.

    Raises:
        StartupError: it is no http or https URL.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        why = "traces go by OTLP/HTTP, not gRPC" if parts.scheme == "grpc" else "not a URL"
        raise StartupError(f"{FLAG} {endpoint}: {why}; write http://HOST:4318{PATH}.")
    path = PATH if parts.path in ("", "/") else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
