"""Traces as OpenTelemetry spans, and the exporter that sends them by OTLP/HTTP. Imports the extra ``otel``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trencadis.server.records.stages import Trace

NAME = "llm_request"
MOST_BYTES = 1 << 16
"""Bytes of a collector's answer that are read."""
NANO = 1_000_000_000


class _Ended(SpanProcessor):
    """Keeps the spans that have ended and are sampled."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanMaker:
    """Makes spans of traces. The sampler, its limits and the resource follow OpenTelemetry's variables."""

    def __init__(self) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "trencadis"}
        self._ended = _Ended()
        provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("trencadis")
        self._propagator = TraceContextTextMapPropagator()

    def spans(self, traces: Iterable[Trace]) -> list[ReadableSpan]:
        """The spans of ``traces``, children beside their requests."""
        for one in traces:
            self._request(one)
        made, self._ended.spans = self._ended.spans, []
        return made

    def _request(self, trace: Trace) -> None:
        parent = self._propagator.extract(trace.parent)
        attributes: dict[str, Any] = dict(trace.attributes)
        span = self._tracer.start_span(
            NAME, parent, SpanKind.SERVER, attributes, start_time=_ns(trace.begin), record_exception=False
        )
        if trace.error:
            span.set_status(StatusCode.ERROR, trace.error)
        inside = set_span_in_context(span, parent)
        for name, begin, end in trace.children:
            self._tracer.start_span(name, inside, start_time=_ns(begin)).end(_ns(end))
        span.end(_ns(trace.end))


class _Session(requests.Session):
    """Reads only the beginning of an answer, so that no collector fills the memory or holds the thread up."""

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        limit = time.monotonic() + (kwargs.get("timeout") or 10.0)
        answer = super().request(*args, **{**kwargs, "stream": True})
        body = b""
        for chunk in answer.iter_content(4096):
            body += chunk
            if len(body) > MOST_BYTES or time.monotonic() > limit:
                break
        answer.close()
        answer._content = body
        return answer


class SpanSender:
    """Sends spans to one collector."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint, session=_Session())

    def send(self, spans: Sequence[ReadableSpan]) -> bool:
        """Whether the collector took them; waits for it as long as OTEL_EXPORTER_OTLP_TIMEOUT says."""
        return self._exporter.export(spans) is SpanExportResult.SUCCESS


def _ns(seconds: float) -> int:
    return int(seconds * NANO)
