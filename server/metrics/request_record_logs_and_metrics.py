"""The record of one HTTP request, from its head to the end of its answer, its times by stage, metrics and log lines.

Requests are counted by route, under the names of FastAPI's usual instrumentation. Times of stages and figures of
speculation are metrics too, by vLLM's names, and so is how many images share launches. Log lines are received, access
and closing; they include contents only if the operator asks for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import CounterMetricFamily, Metric

from trencadis.core.engine_stats import EngineStats
from trencadis.core.json_types import JsonObject
from trencadis.core.process.engine_messages import BucketUse
from trencadis.core.request import RequestStats, SamplingParams
from trencadis.server.engine.engine_client_and_request_timing import RequestTiming

CLIENT_CLOSED = 499
"""Status of a request whose client disconnected before it was answered."""


@dataclass(slots=True)
class RequestRecord:
    """Record of one HTTP request, filled by the layers that handle it; times are ``time.monotonic``.

    Args:
        id: what the answer's header ``x-request-id`` says.
        started_at: when it came, in seconds since 1970.
        client: address and port, as a trusted proxy names them.
        parent: the headers ``traceparent`` and ``tracestate``, if the client sent them.
        tenant: its name in the key file; never a key.
        rank: the header ``X-data-parallel-rank``, which pins it to one of several engines.
        deadline: the time by which it must have ended; None: no deadline.
        timer: cancels the running work at the deadline.
        fair_queue_seconds: seconds that it waited in the fair queue.
        runs_model: whether it came to a route that runs the model.
        sent: bytes of the answer's body so far.
        answer: the id in the answer.
        error: the type of the error that it ended with.
        params: of its first generation.
        texts: pieces of each choice's text, if the log shows them.
    """

    id: str
    method: str = ""
    path: str = ""
    client: str = ""
    parent: dict[str, str] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    tenant: str = ""
    rank: str = ""
    deadline: float | None = None
    timer: asyncio.Timeout | None = None
    fair_queue_seconds: float = 0.0
    runs_model: bool = False
    answer: str = ""
    model: str = ""
    status: int = 0
    answered: float = 0.0
    sent: int = 0
    end: float = 0.0
    error: str = ""
    params: SamplingParams | None = None
    timings: list[RequestTiming] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The reason why it ended: the type of its error, else the finish reasons of its choices, else its status."""
        reasons = [reason for timing in self.timings for reason in timing.finish]
        if self.error or reasons:
            return self.error or ",".join(dict.fromkeys(reasons))
        return "abort" if self.status in (0, CLIENT_CLOSED) else str(self.status)

    @property
    def timing(self) -> RequestTiming | None:
        """The timings of all its prompts combined into one; None if none ran."""
        return join_timings(self.timings) if len(self.timings) > 1 else next(iter(self.timings), None)

    @property
    def stats(self) -> list[RequestStats]:
        """The engine's statistics of each choice that it has ended."""
        return [stats for timing in self.timings for stats in timing.stats]

    @property
    def cached(self) -> int:
        """Tokens of its prompts that came from the prefix cache."""
        return sum(timing.cached for timing in self.timings)


RECORD: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""The record of the request that this task serves."""


def join_timings(timings: Sequence[RequestTiming]) -> RequestTiming:
    """Combines the timings of one request's prompts: sums, the earliest start, the latest end."""
    first = timings[0]
    return RequestTiming(
        first.id,
        min(t.start for t in timings),
        sum(t.prompt_tokens for t in timings),
        sum(t.image_tokens for t in timings),
        sum(t.max_tokens for t in timings),
        sum(t.n for t in timings),
        first=min((t.first for t in timings if t.first is not None), default=None),
        end=max((t.end for t in timings if t.end is not None), default=None),
        generated=sum(t.generated for t in timings),
        finish=[reason for t in timings for reason in t.finish],
        streams=[stream for t in timings for stream in t.streams],
        media=sum(t.media for t in timings),
        prepared=sum(t.prepared for t in timings),
        fair_queue_seconds=first.fair_queue_seconds,
        media_seconds={stage: sum(t.media_seconds.get(stage, 0.0) for t in timings) for stage in first.media_seconds},
    )


LABELS = ("model_name", "engine")


def make_speculation_families(values: Sequence[str], stats: EngineStats) -> Iterator[Metric]:
    """Yields the counters of drafts, of their tokens, of accepted tokens, and of these by their place in the draft."""
    for name, text, count in (
        ("drafts", "drafts of sequences that steps have verified", stats.spec_drafts),
        ("draft_tokens", "tokens of these drafts", stats.spec_draft_tokens),
        ("accepted_tokens", "those of them that became part of an answer", stats.spec_accepted),
    ):
        counter = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=LABELS)
        counter.add_metric(values, count)
        yield counter
    places = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "accepted tokens by their place in the draft, from 0",
        labels=(*LABELS, "position"),
    )  # fmt: skip
    for place, count in enumerate(stats.spec_accepted_at or [0]):
        places.add_metric((*values, str(place)), count)
    yield places


def format_acceptance(stats: EngineStats, last: EngineStats) -> list[str]:
    """Returns the part of the throughput line about drafts since ``last``; empty if none was verified."""
    drafted, accepted = stats.spec_draft_tokens - last.spec_draft_tokens, stats.spec_accepted - last.spec_accepted
    if drafted <= 0:
        return []
    steps = max(stats.spec_drafts - last.spec_drafts, 1)
    return [
        f"Mean acceptance length: {1 + accepted / steps:.2f}",
        f"Draft acceptance rate: {100 * accepted / drafted:.1f}%",
    ]


def format_drafts(choices: Sequence[RequestStats]) -> list[str]:
    """Returns the part of a request's closing line about its drafts; empty if none was verified."""
    drafted = sum(choice.drafted for choice in choices)
    return [f"drafts {drafted}, {sum(choice.accepted for choice in choices)} accepted"] if drafted else []


STAGES = ("turn", "media_fetch", "media_decode", "media_resize", "queue", "encode", "prefill", "decode")
"""Stages in order. Media seconds are summed over a request's images, although these are prepared in parallel."""
SECONDS = (.001, .003, .01, .03, .1, .3, 1, 3, 10, 30, 100, 300)  # fmt: skip
PER_LAUNCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def get_stage_seconds(timing: RequestTiming) -> dict[str, float]:
    """Returns the seconds by stage of the slowest choice; stages that the request does not have are left out."""
    found: dict[str, float] = {"turn": timing.fair_queue_seconds} if timing.fair_queue_seconds else {}
    if timing.media:
        found |= {f"media_{name}": seconds for name, seconds in timing.media_seconds.items()}
    stats = timing.slowest
    if stats is not None:
        found["queue"] = stats.queue
        if timing.media:
            found["encode"] = stats.encode
        found["prefill"] = max(stats.prefill - stats.encode, 0.0)
        found["decode"] = stats.decode
    return found


def format_closing(timing: RequestTiming) -> str:
    """Returns the end of a request's last log line: seconds by stage, cache hits, launches, buckets of the slowest
    choice.
    """
    parts = [" ".join(f"{name} {seconds:.3f}" for name, seconds in get_stage_seconds(timing).items())]
    if timing.media:
        kept, encoded = timing.media - timing.prepared, sum(s.image_hits for s in timing.stats)
        parts.append(f"media {timing.media}, {kept} from the processor cache, {encoded} from the encoder cache")
    slowest = timing.slowest
    if slowest is not None:
        launches, misses = sum(s.launches for s in timing.stats), sum(s.misses for s in timing.stats)
        parts.append(f"launches {launches}, {launches - misses} in planned buckets")
        parts.append(f"buckets {_join_names(slowest.first_buckets)}, {_join_names(slowest.last_buckets)}")
        parts += format_drafts(timing.stats)
    return "; ".join(part for part in parts if part)


def _join_names(names: list[str]) -> str:
    return "+".join(names) or "-"


class StageMetrics:
    """``vllm:request_stage_seconds`` and the encoder's launches. ``engines``: the labels of each engine."""

    def __init__(self, registry: CollectorRegistry, engines: Sequence[Sequence[str]]) -> None:
        self._stages = Histogram(
            "vllm:request_stage_seconds", "seconds of a request by stage", (*LABELS, "stage"),
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        for values in engines:
            for name in STAGES:
                self._stages.labels(*values, name)
        self._launches = self._make_counter(registry, "encoder_launches", "launches of the vision tower")
        self._needed = self._make_counter(registry, "encoder_needed_slots", "patch slots that images needed")
        self._launched = self._make_counter(registry, "encoder_launched_slots", "patch slots that were launched")
        self._forward = Histogram(
            "vllm:encoder_forward_seconds", "seconds of a launch of the vision tower", LABELS, buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self._together = Histogram(
            "vllm:encoder_images_per_launch", "images of one launch", LABELS, buckets=PER_LAUNCH, registry=registry
        )
        for values in engines:
            self._forward.labels(*values)
            self._together.labels(*values)

    def record_finished(self, timing: RequestTiming, values: Sequence[str]) -> None:
        """Records a finished request of the engine with these labels."""
        for name, seconds in get_stage_seconds(timing).items():
            self._stages.labels(*values, name).observe(seconds)

    def record_launch(self, use: BucketUse, values: Sequence[str]) -> None:
        """Records a VISION launch of the engine with these labels."""
        self._launches.labels(*values).inc()
        self._needed.labels(*values).inc(use.needed)
        self._launched.labels(*values).inc(use.padded)
        self._forward.labels(*values).observe(use.seconds)
        self._together.labels(*values).observe(use.items)

    @staticmethod
    def _make_counter(registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=registry)


log = logging.getLogger("trencadis.server")
access = logging.getLogger("uvicorn.access")
LONGEST_PATH = 500
IDLE = "request %s: did not run, total %.3f s, %s"
PARAMS = ("max_tokens", "n", "temperature", "top_p", "top_k", "seed")


def log_access(record: RequestRecord, version: str) -> None:
    """Logs the access line in uvicorn's format, with additional fields: seconds until the answer begins, id and
    tenant.
    """
    if not access.isEnabledFor(logging.INFO) or not access.hasHandlers():
        return
    access.info(
        '%s - "%s %s HTTP/%s" %d, %.3f s, request %s%s',
        record.client, record.method, _get_path(record), version, record.status, record.answered - record.begun,
        record.id,
        f", tenant {record.tenant}" if record.tenant else "",
        extra={"fields": partial(_make_access_fields, record)},
    )  # fmt: skip


def _get_path(record: RequestRecord) -> str:
    """Returns the path without the query, where some clients put keys."""
    return quote(record.path[:LONGEST_PATH])


def _make_access_fields(record: RequestRecord) -> JsonObject:
    """Returns the fields of the access line for ``--log-format json``."""
    return {
        "event": "access", "id": record.id, "tenant": record.tenant, "client": record.client,
        "method": record.method, "path": _get_path(record), "status": record.status,
        "seconds": round(record.answered - record.begun, 6),
    }  # fmt: skip


def log_received(record: RequestRecord, tokens: int, media: int, params: SamplingParams, prompt: str | None) -> None:
    """Logs the line of ``--enable-log-requests``; ``prompt``: its text, if the operator asks for contents."""
    shown = {name: getattr(params, name) for name in PARAMS if getattr(params, name) is not None}
    fields: JsonObject = {
        "event": "received", "id": record.id, "answer": record.answer, "tenant": record.tenant,
        "prompt_tokens": tokens, "media": media, "params": shown,
    }  # fmt: skip
    text = ""
    if prompt is not None:
        fields["prompt"] = prompt
        text = f", prompt {json.dumps(prompt)}"
    words = ", ".join(f"{name} {value:g}" for name, value in shown.items())
    log.info(
        "request %s received: %d tokens, %d media, %s%s",
        record.answer, tokens, media, words, text, extra={"fields": lambda: fields},
    )  # fmt: skip


def log_closing(record: RequestRecord, most: int | None) -> None:
    """Logs the line at the end of a request to a route that runs the model.

    Args:
        most: most characters of an answer's text.
    """
    named, seconds, timing = record.answer or record.id, record.end - record.begun, record.timing
    ended = f"{record.outcome}, tenant {record.tenant}" if record.tenant else record.outcome
    extra = {"fields": partial(_make_closing_fields, record, most)}
    if timing is None:
        log.info(IDLE, named, seconds, ended, extra=extra)
        return
    parts = [ended, format_closing(timing)]
    if record.texts:
        parts.append(f"answers {json.dumps(_join_texts(record, most))}")
    log.info(
        "request %s: %d prompt tokens (%d cached, %d image), %d generated, first token %s, total %.3f s, %s",
        named, timing.prompt_tokens, record.cached, timing.image_tokens, timing.generated,
        "-" if timing.first is None else f"{timing.first - record.begun:.3f} s", seconds,
        "; ".join(filter(None, parts)), extra=extra,
    )  # fmt: skip


def _make_closing_fields(record: RequestRecord, most: int | None) -> JsonObject:
    """Returns the fields of the closing line for ``--log-format json``."""
    fields: JsonObject = {
        "event": "closing", "id": record.id, "answer": record.answer, "tenant": record.tenant, "path": record.path,
        "status": record.status, "outcome": record.outcome, "seconds": round(record.end - record.begun, 6),
    }  # fmt: skip
    timing, stats = record.timing, record.stats
    if timing is None:
        return fields
    slowest = timing.slowest
    fields |= {
        "prompt_tokens": timing.prompt_tokens, "cached_tokens": record.cached, "image_tokens": timing.image_tokens,
        "generated_tokens": timing.generated, "media": timing.media,
        "first_token_seconds": None if timing.first is None else round(timing.first - record.begun, 6),
        "stages": {name: round(value, 6) for name, value in get_stage_seconds(timing).items()},
        "launches": sum(s.launches for s in stats), "unplanned": sum(s.misses for s in stats),
        "preemptions": sum(s.preemptions for s in stats),
        "drafted_tokens": sum(s.drafted for s in stats), "accepted_tokens": sum(s.accepted for s in stats),
        "buckets": {
            "first": slowest.first_buckets if slowest else [], "last": slowest.last_buckets if slowest else [],
        },
    }  # fmt: skip
    if record.texts:
        fields["outputs"] = _join_texts(record, most)
    return fields


def _join_texts(record: RequestRecord, most: int | None) -> list[str]:
    """Returns the texts of all choices, at most ``most`` characters of each."""
    return ["".join(pieces)[:most] for pieces in record.texts]


HTTP_SECONDS = (0.1, 0.5, 1)
"""Histogram buckets of the seconds by route and method."""
FINE = (.01, .025, .05, .075, .1, .25, .5, .75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)  # fmt: skip
"""Histogram buckets of the seconds of all routes together."""


class HttpMetrics:
    """Counts, seconds and bytes of answered requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("http_requests", "HTTP requests", ("handler", "method", "status"), registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "HTTP seconds",
            ("handler", "method"),
            buckets=HTTP_SECONDS,
            registry=registry,
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds", "HTTP seconds of all routes", buckets=FINE, registry=registry
        )
        self._received = Summary("http_request_size_bytes", "bytes of request bodies", ("handler",), registry=registry)
        self._refusals = Counter(
            "http_refused_requests", "requests refused for their head, its form or the size of their body",
            ("status", "reason"), registry=registry,
        )  # fmt: skip
        self._sent = Summary("http_response_size_bytes", "bytes of response bodies", ("handler",), registry=registry)

    def observe(self, route: str, method: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Records an answered request; ``received`` and ``sent`` are bytes of the bodies."""
        self._requests.labels(route, method, f"{status // 100}xx").inc()
        self._seconds.labels(route, method).observe(seconds)
        self._fine.observe(seconds)
        self._received.labels(route).observe(received)
        self._sent.labels(route).observe(sent)

    def count_refusal(self, status: int, reason: str) -> None:
        """Counts a request refused with ``status``; ``reason`` is one of few words: host, origin, body, fields, ..."""
        self._refusals.labels(str(status), reason).inc()


class RecordSink(Protocol):
    """Protocol of what takes the records of ended requests."""

    def add(self, record: RequestRecord) -> None:
        """Takes the record of a request that has ended."""
        ...


def end_request(record: RequestRecord, max_log_len: int | None, traces: RecordSink | None) -> None:
    """Writes the closing line of a request that ran the model, and queues its trace."""
    if record.runs_model:
        log_closing(record, max_log_len)
        if traces is not None:
            traces.add(record)
