"""Sends a trace of each request to a collector, from a thread that no request ever waits for.

A request puts a few numbers into a bounded queue; the thread makes spans of them and sends those. While the collector
is unreachable the queue keeps the latest requests, no spans are made, and attempts become rare.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from trencadis.core.errors import StartupError
from trencadis.server.metrics.request_record import RequestRecord
from trencadis.server.metrics.trace_stages import RequestSummary, Trace, make_trace, summarise_request

log = logging.getLogger("trencadis.server")
MOST = 2048
"""Most requests that wait to be sent; further ones push the oldest out."""
AT_A_TIME = 128
EVERY = 1.0
"""Seconds between two batches."""
LONGEST_PAUSE = 60.0
TRIES = 5
"""Most attempts to send a batch to a collector that accepts connections but not the batch; then the batch is
dropped.
"""
PATH = "/v1/traces"
FLAG = "--otlp-traces-endpoint"


class SpanBuilder(Protocol):
    """Makes spans of traces."""

    def make_spans(self, traces: Sequence[Trace]) -> Sequence[object]:
        """Makes the spans of ``traces``."""
        ...


class SpanExporter(Protocol):
    """Sends spans."""

    def reachable(self) -> bool:
        """Returns False if sending would fail, so that making spans is not worthwhile; sends nothing."""
        ...

    def send(self, spans: Sequence[object]) -> bool:
        """Sends spans; returns True if the collector accepted them."""
        ...


class TraceQueue:
    """The queue and its thread, which starts with the first request.

    Args:
        open: makes the span builder and the exporter; called in the thread.
    """

    def __init__(
        self, endpoint: str, open: Callable[[], tuple[SpanBuilder, SpanExporter]], every: float = EVERY
    ) -> None:
        self.endpoint = endpoint
        self.sent, self.dropped = 0, 0
        self._open, self._every = open, every
        self._waiting: deque[RequestSummary] = deque()
        self._batch: Sequence[object] = ()
        self._of, self._tries = 0, 0  # requests of the batch, and how often it was sent
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing, self._unsure = False, True
        self._spent, self._thread_spent = 0.0, 0.0

    @classmethod
    def for_endpoint(cls, endpoint: str) -> TraceQueue:
        """Makes the queue for the collector at ``endpoint``.

        Raises:
            StartupError: the endpoint is no URL of OTLP/HTTP, or the extra ``otel`` is not installed.
        """
        url = make_collector_url(endpoint)
        try:
            spans = importlib.import_module("trencadis.server.metrics.otel_spans")
        except ImportError:
            raise StartupError(f"{FLAG} needs OpenTelemetry: pip install 'trencadis[otel]'.") from None
        # This server logs one line when a collector fails; the library would log several for each attempt.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        return cls(url, lambda: (spans.SpanMaker(), spans.SpanSender(url)))

    @property
    def cpu_seconds(self) -> float:
        """CPU time that traces have taken so far, on the requests' path and in the thread."""
        return self._spent + self._thread_spent

    def add(self, record: RequestRecord) -> None:
        """Queues the trace of a request that has ended."""
        begun = time.thread_time()
        if len(self._waiting) >= MOST:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(summarise_request(record))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        self._spent += time.thread_time() - begun

    def close(self, seconds: float) -> None:
        """Sends the waiting traces, for ``seconds`` at most; a thread that waits for its collector ends with the
        process.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)
        lost = len(self._waiting) + self._of + self.dropped
        if lost:
            log.warning("%d traces were not sent to %s", lost, self.endpoint)

    def _run(self) -> None:
        maker, sender = self._open()
        pause = self._every
        while True:
            stopping = self._stop.wait(pause)
            taken = self._attempt(maker, sender)
            if taken:
                pause = 0.0 if len(self._waiting) >= AT_A_TIME else self._every
            else:
                pause = min(max(2 * pause, self._every), LONGEST_PAUSE)
            self._thread_spent = time.thread_time()
            if stopping and not (taken and self._waiting):
                return

    def _attempt(self, maker: SpanBuilder, sender: SpanExporter) -> bool:
        """Sends the next batch; False: the batch and later requests keep waiting.

        Spans of a batch are made once, and if the collector was unreachable only when it accepts connections again.
        """
        if not (self._of or self._waiting):
            return True
        try:
            taken = (not self._unsure or sender.reachable()) and self._send(maker, sender)
        except Exception as error:  # an error in the library must not end the thread
            log.debug("traces: %r", error)
            taken = False
        self._unsure = not taken
        if taken:
            self.sent += self._of
        if taken or self._tries >= TRIES:
            self.dropped += 0 if taken else self._of
            self._batch, self._of, self._tries = (), 0, 0
        self._log_state(taken)
        return taken

    def _send(self, maker: SpanBuilder, sender: SpanExporter) -> bool:
        self._tries += 1
        if not self._of:
            some = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_A_TIME))]
            # a batch whose spans cannot be made is not tried again
            self._of, tries, self._tries = len(some), self._tries, TRIES
            self._batch = maker.make_spans([make_trace(summaries) for summaries in some])
            self._tries = tries
        return not self._batch or sender.send(self._batch)

    def _log_state(self, taken: bool) -> None:
        """Logs one line when a collector begins to fail, and one when it accepts traces again."""
        if taken == self._failing:
            self._failing = not taken
            if taken:
                log.info("%s takes traces again", self.endpoint)
            else:
                log.warning("%s takes no traces; the latest %d requests wait for it", self.endpoint, MOST)


def make_collector_url(endpoint: str) -> str:
    """Returns the URL to which traces are posted: ``endpoint``, with OTLP's usual path if it has none.

    Raises:
        StartupError: ``endpoint`` is no http or https URL.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        why = "traces go by OTLP/HTTP, not gRPC" if parts.scheme == "grpc" else "not a URL"
        raise StartupError(f"{FLAG} {endpoint}: {why}; write http://HOST:4318{PATH}.")
    path = PATH if parts.path in ("", "/") else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
