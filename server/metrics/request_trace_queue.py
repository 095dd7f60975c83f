"""A trace of each request: its attributes and the times of its stages, sent to a collector. Uses no tracing library.

On the request's path only ``summarise_request`` runs and puts a few numbers into a bounded queue; a thread, for which
no request ever waits, makes spans of them and sends those. While the collector is unreachable the queue keeps the
latest requests, no spans are made, and attempts become rare.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit, urlunsplit

from trencadis.core.errors import StartupError
from trencadis.core.request import RequestStats
from trencadis.server.metrics.request_record_logs_and_metrics import RequestRecord

Value = str | int | float | list[str]


class StageSpan(NamedTuple):
    """A stage: seconds since 1970 at which it begins and ends."""

    name: str
    begin: float
    end: float


class PromptSummary(NamedTuple):
    """The prompt that ended last, and the choice of it that took longest; times are ``time.monotonic``."""

    start: float
    end: float | None
    first: float | None
    media_begun: float
    media_ended: float
    stats: RequestStats | None


class RequestSummary(NamedTuple):
    """The facts of an ended request that its trace needs; holds no prompt, answer or pixels.

    Args:
        started_at: when it came, in seconds since 1970; ``begun`` is the same moment of ``time.monotonic``.
        first: when the first token came.
        params: max_tokens, temperature, top_p and n.
        counts: tokens of prompts, generated tokens, choices.
        slowest: statistics of the choice of all prompts that took longest.
    """

    started_at: float
    begun: float
    end: float
    first: float | None
    fair_queue_seconds: float
    id: str
    model: str
    method: str
    path: str
    status: int
    outcome: str
    error: str
    tenant: str
    parent: dict[str, str]
    params: tuple[int | None, float, float, int] | None
    counts: tuple[int, int, int]
    prompt: PromptSummary | None
    slowest: RequestStats | None


@dataclass(slots=True)
class Trace:
    """One request in the form from which ``otel_spans`` makes spans; times in seconds since 1970.

    Args:
        parent: headers ``traceparent`` and ``tracestate``, unchanged.
        error: the type of the error that it ended with.
    """

    begin: float
    end: float
    parent: dict[str, str]
    attributes: dict[str, Value]
    error: str = ""
    children: list[StageSpan] = field(default_factory=list)


def summarise_request(record: RequestRecord) -> RequestSummary:
    """Collects the facts of a request that has ended."""
    whole, stats, p = record.timing, record.stats, record.params
    slowest, prompt = _find_slowest(stats), None
    if whole is not None:
        one = len(record.timings) == 1
        last = whole if one else max(record.timings, key=lambda t: t.end or t.start)
        of = slowest if one else _find_slowest([s.stats for s in last.streams if s.stats is not None])
        prompt = PromptSummary(last.start, last.end, last.first, last.media_begun, last.media_ended, of)
    return RequestSummary(
        record.started_at, record.begun, record.end, None if whole is None else whole.first, record.fair_queue_seconds,
        record.answer or record.id, record.model, record.method, record.path[:200], record.status, record.outcome,
        record.error, record.tenant, record.parent,
        None if p is None else (p.max_tokens, p.temperature, p.top_p, p.n),
        (0, 0, 0) if whole is None else (whole.prompt_tokens, whole.generated, whole.n),
        prompt, slowest,
    )  # fmt: skip


def _find_slowest(stats: list[RequestStats]) -> RequestStats | None:
    if len(stats) < 2:
        return stats[0] if stats else None
    return max(stats, key=lambda s: s.queue + s.prefill + s.decode)


def make_trace(summary: RequestSummary) -> Trace:
    """Makes the trace of a request."""
    end = summary.started_at + summary.end - summary.begun
    children = [] if summary.prompt is None else _make_children(summary, summary.prompt)
    return Trace(summary.started_at, end, summary.parent, _make_attributes(summary), summary.error, children)


def _make_children(summary: RequestSummary, prompt: PromptSummary) -> list[StageSpan]:
    """Returns the stages of one choice, one after the other; together they cover the whole time of the request."""
    shift = summary.started_at - summary.begun
    came = summary.begun + summary.fair_queue_seconds
    found = [StageSpan("turn", summary.begun, came)] if summary.fair_queue_seconds else []
    found.append(StageSpan("prepare", came, prompt.media_begun or prompt.start))
    if prompt.media_begun:
        found.append(StageSpan("media", prompt.media_begun, prompt.media_ended))
        found.append(StageSpan("place", prompt.media_ended, prompt.start))
    last = summary.end if prompt.end is None else prompt.end
    if prompt.stats is not None:
        found += _engine_stages(prompt, prompt.stats, last, shift)
    elif prompt.first is not None:
        # The request was cut off, so the engine reported nothing.
        found += [StageSpan("prefill", prompt.start, prompt.first), StageSpan("decode", prompt.first, last)]
    found.append(StageSpan("answer", last, summary.end))
    return [StageSpan(name, begin + shift, max(begin, end) + shift) for name, begin, end in found]


def _engine_stages(prompt: PromptSummary, stats: RequestStats, last: float, shift: float) -> list[StageSpan]:
    """Returns the engine's stages between ``prompt.start`` and ``last``, with the transfers to it and back.

    The engine reports how long its stages took and when the last one ended, by its own machine's clock. A clock that
    differs shifts them no further than ``prompt.start`` and ``last`` allow.
    """
    queue, decode = stats.queue, stats.decode
    prefill = max(stats.prefill - stats.encode, 0.0)
    spare = last - prompt.start - (queue + stats.encode + prefill + decode)
    back = min(max(last + shift - stats.ended, 0.0), max(spare, 0.0)) if stats.ended else 0.0
    at = prompt.start + max(spare - back, 0.0)
    found = [StageSpan("submit", prompt.start, at)]
    for name, seconds in (("queue", queue), ("encode", stats.encode), ("prefill", prefill), ("decode", decode)):
        if name != "encode" or prompt.media_begun:
            found.append(StageSpan(name, at, min(at + seconds, last)))
            at = found[-1].end
    found.append(StageSpan("deliver", at, last))
    return found


def _make_attributes(summary: RequestSummary) -> dict[str, Value]:
    """Returns attributes by vLLM's names; attributes that vLLM lacks have another prefix. No contents, no keys."""
    found: dict[str, Value | None] = {
        "gen_ai.request.id": summary.id,
        "gen_ai.response.model": summary.model or None,
        "gen_ai.usage.prompt_tokens": summary.counts[0],
        "gen_ai.usage.completion_tokens": summary.counts[1],
        "gen_ai.usage.num_sequences": summary.counts[2],
        "gen_ai.latency.e2e": summary.end - summary.begun,
        "gen_ai.latency.time_to_first_token": None if summary.first is None else summary.first - summary.begun,
        "http.request.method": summary.method,
        "http.response.status_code": summary.status,
        "url.path": summary.path,
        "trencadis.outcome": summary.outcome,
        "trencadis.tenant": summary.tenant or None,
    }
    if summary.params is not None:
        names = "max_tokens", "temperature", "top_p", "n"
        found |= {f"gen_ai.request.{name}": value for name, value in zip(names, summary.params, strict=True)}
    slow = summary.slowest
    if slow is not None:
        found |= {
            "gen_ai.latency.time_in_queue": slow.queue + summary.fair_queue_seconds,
            "gen_ai.latency.time_in_model_prefill": slow.prefill,
            "gen_ai.latency.time_in_model_decode": slow.decode,
            "gen_ai.latency.time_in_model_inference": slow.prefill + slow.decode,
            "trencadis.buckets.first": slow.first_buckets,
            "trencadis.buckets.last": slow.last_buckets,
        }
    return {name: value for name, value in found.items() if value is not None}


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
