"""Traces as OpenTelemetry spans, and the exporter that sends them by OTLP/HTTP. Imports the extra ``otel``."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import SamplingResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trencadis.server.metrics.request_trace_queue import Trace

NAME = "llm_request"
MOST_BYTES = 1 << 16
"""Most bytes of a collector's answer that are read."""
NANO = 1_000_000_000
LOOK_SECONDS = 2.0
"""Seconds in which a collector must accept a connection that only tests whether it is reachable."""
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class SpanMaker:
    """Makes spans of traces. The sampler, its limits and the resource follow OpenTelemetry's variables.

    A request's spans are made all at once when it has ended, so they are plain values, not the library's running spans,
    which cost three times as much.
    """

    def __init__(self) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "trencadis"}
        # Only the settings that the provider has read from the variables are used.
        provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._sampler, self._ids, self._resource = provider.sampler, provider.id_generator, provider.resource
        limits = SpanLimits()
        self._most, self._longest = limits.max_span_attributes, limits.max_span_attribute_length
        self._disabled = os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"
        self._scope = InstrumentationScope("trencadis")
        self._propagator = TraceContextTextMapPropagator()

    def make_spans(self, traces: Iterable[Trace]) -> list[ReadableSpan]:
        """Returns the spans of ``traces`` that are sampled, child spans together with those of their requests."""
        made: list[ReadableSpan] = []
        for one in () if self._disabled else traces:
            self._make_request_span(one, made)
        return made

    def _make_request_span(self, trace: Trace, made: list[ReadableSpan]) -> None:
        context = self._propagator.extract(trace.parent) if trace.parent else None
        parent = None if context is None else get_current_span(context).get_span_context()
        if parent is None or not parent.is_valid:
            context, parent = None, None
        number = self._ids.generate_trace_id() if parent is None else parent.trace_id
        sampling = self._sampler.should_sample(context, number, NAME, SpanKind.SERVER, trace.attributes, ())
        if not sampling.decision.is_sampled():  # type: ignore[no-untyped-call]
            return
        own = self._make_context(number, sampling)
        status = Status(StatusCode.ERROR, trace.error) if trace.error else Status(StatusCode.UNSET)
        made.append(
            ReadableSpan(
                NAME, own, parent, self._resource, self._limit_attributes(sampling), kind=SpanKind.SERVER,
                status=status,
                start_time=_to_nanoseconds(trace.begin), end_time=_to_nanoseconds(trace.end),
                instrumentation_scope=self._scope,
            )
        )  # fmt: skip
        for name, begin, end in trace.children:
            made.append(
                ReadableSpan(
                    name, self._make_context(number, sampling), own, self._resource, start_time=_to_nanoseconds(begin),
                    end_time=_to_nanoseconds(end),
                    instrumentation_scope=self._scope,
                )
            )  # fmt: skip

    def _make_context(self, trace: int, sampling: SamplingResult) -> SpanContext:
        return SpanContext(trace, self._ids.generate_span_id(), False, SAMPLED, sampling.trace_state)

    def _limit_attributes(self, sampling: SamplingResult) -> Any:
        """Returns the attributes, copied only if a limit cuts them."""
        if self._longest is None and (self._most is None or len(sampling.attributes) <= self._most):
            return sampling.attributes
        return BoundedAttributes(self._most, sampling.attributes, max_value_len=self._longest)


class _Session(requests.Session):
    """Reads only the beginning of an answer, so that a collector can neither fill the memory nor block the thread."""

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
        at = urlsplit(endpoint)
        self._address = at.hostname or "", at.port or (443 if at.scheme == "https" else 80)
        proxies = requests.utils.get_environ_proxies(endpoint)
        self._direct = requests.utils.select_proxy(endpoint, proxies) is None

    def reachable(self) -> bool:
        """Returns True if the collector accepts a connection; always True behind a proxy."""
        if not self._direct:
            return True
        with contextlib.suppress(OSError, UnicodeError), socket.create_connection(self._address, LOOK_SECONDS):
            return True
        return False

    def send(self, spans: Sequence[ReadableSpan]) -> bool:
        """Sends spans; returns True if the collector accepted them within OTEL_EXPORTER_OTLP_TIMEOUT."""
        return self._exporter.export(spans) is SpanExportResult.SUCCESS


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * NANO)
