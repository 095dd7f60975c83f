"""Traces: what a collector receives of each request, and that one which is away, slow or lying costs nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.host.instruction_counts import instructions
from tests.operations.otlp_collector import Collector
from trencadis.core.errors import StartupError
from trencadis.core.request import RequestStats, SamplingParams
from trencadis.server.engine.engine_client_and_request_timing import RequestTiming
from trencadis.server.metrics import request_trace_queue
from trencadis.server.metrics.process_tenant_and_sleep_collectors import TraceCollector
from trencadis.server.metrics.request_record_logs_and_metrics import RequestRecord
from trencadis.server.metrics.request_trace_queue import Trace, TraceQueue, summarise_request
from trencadis.server.metrics.request_trace_queue import make_trace as made_of

needs_otel = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.exporter") is None or importlib.util.find_spec("opentelemetry.sdk") is None,
    reason="OpenTelemetry is not installed (trencadis[otel])",
)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{}"
KEY = "very-secret-key"


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def traced(harness: ScriptedApp, url: str, **flags: Any) -> TraceQueue:
    app = harness.app(otlp_traces_endpoint=url, **flags)
    state = app.state.trencadis
    traces: TraceQueue = state.traces
    traces._every = 0.05
    return traces


def values(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@needs_otel
def test_a_collector_receives_each_request_with_its_parent_and_its_stages(
    harness: ScriptedApp, collector: Collector
) -> None:
    traces = traced(harness, collector.url, api_key=[KEY])
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"messages": [{"role": "user", "content": "a secret text"}], "max_tokens": 3, "temperature": 0.5}
    first = harness.call("/v1/chat/completions", body, headers=headers | {"traceparent": PARENT.format("01")})
    assert (
        harness.call("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 2}, headers=headers).status_code == 200
    )
    harness.call("/v1/chat/completions", body, headers=headers | {"traceparent": PARENT.format("00")})  # not sampled
    harness.call("/v1/chat/completions", body, headers=headers | {"traceparent": "rubbish"})
    harness.call("/health")
    harness.engine.fail_at = 1
    harness.call("/v1/chat/completions", body, headers=headers)
    traces.close(20)
    spans = collector.spans()
    requests = [s for s in spans if s.name == "llm_request"]
    assert len(requests) == 4
    mine = values(requests[0])
    assert requests[0].trace_id.hex() == PARENT.split("-")[1] and requests[0].parent_span_id.hex() == "b7ad6b7169203331"
    assert not requests[1].parent_span_id and not requests[2].parent_span_id
    assert mine["gen_ai.request.id"] == first.json()["id"] and mine["gen_ai.response.model"] == "m"
    usage = first.json()["usage"]
    assert mine["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"] and mine["gen_ai.usage.completion_tokens"] == 3
    assert mine["gen_ai.request.max_tokens"] == 3 and mine["gen_ai.request.temperature"] == 0.5
    assert mine["gen_ai.latency.time_in_queue"] == 0.1 and mine["gen_ai.latency.time_in_model_decode"] == 0.3
    assert 0 < mine["gen_ai.latency.time_to_first_token"] <= mine["gen_ai.latency.e2e"]
    assert requests[0].kind == 2 and requests[0].status.code == 0
    assert values(requests[1])["gen_ai.usage.num_sequences"] == 2
    failed = requests[3]
    assert failed.status.code == 2 and values(failed)["trencadis.outcome"] == "ServiceUnavailableError"
    for request in requests:
        children = [s for s in spans if s.parent_span_id == request.span_id]
        assert {"prepare", "answer"} <= {c.name for c in children}
        for child in children:
            assert child.trace_id == request.trace_id
            assert request.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
            assert child.end_time_unix_nano <= request.end_time_unix_nano + 1000
    everything = b"".join(collector.bodies)
    assert KEY.encode() not in everything and b"a secret text" not in everything


def record_of(ended: float = 13.54, **given: Any) -> RequestRecord:
    """A request that came at 100 s, had media from 101 to 103 s, entered at 103.5 s and ended at 114 s.

    Args:
        ended: when the engine had its last token, by its own clock, in seconds since the request came.
    """

    class Stream:
        stats = RequestStats(queue=2.0, prefill=4.0, decode=4.0, encode=1.5, ended=1e9 + ended)

    timing = RequestTiming("r", 103.5, 10, 5, 5, 1, streams=[Stream()], first=109.6, end=113.6, media=1)  # type: ignore[list-item]
    timing.media_begun, timing.media_ended = 101.0, 103.0
    made = RequestRecord("id", begun=100.0, started_at=1e9, end=114.0, timings=[timing])
    for name, value in given.items():
        setattr(made, name, value)
    return made


def trace_of(record: RequestRecord) -> Trace:
    return made_of(summarise_request(record))


def test_a_wait_for_a_turn_comes_before_the_preparation() -> None:
    trace = trace_of(record_of(fair_queue_seconds=0.4))
    spans = {c.name: (c.begin - 1e9, c.end - 1e9) for c in trace.children[:2]}
    assert spans == {"turn": (0.0, pytest.approx(0.4)), "prepare": (pytest.approx(0.4), 1.0)}
    assert trace.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(2.4)


@pytest.mark.parametrize(("ended", "submitted"), [(13.54, 0.04), (13.6, 0.1), (900.0, 0.1), (-900.0, 0.0), (-1e9, 0.1)])
def test_children_follow_each_other_and_sum_to_the_whole(ended: float, submitted: float) -> None:
    """Also where the engine's clock is another machine's; the last engine tells no time."""
    trace = trace_of(record_of(ended))
    spans = {c.name: (round(c.begin - 1e9, 4), round(c.end - 1e9, 4)) for c in trace.children}
    at = 3.5 + submitted
    stages = {"queue": 2.0, "encode": 1.5, "prefill": 2.5, "decode": 4.0}
    expected = {"prepare": (0.0, 1.0), "media": (1.0, 3.0), "place": (3.0, 3.5), "submit": (3.5, round(at, 4))}
    for name, seconds in stages.items():
        expected[name] = (round(at, 4), round(at + seconds, 4))
        at += seconds
    assert spans == expected | {"deliver": (round(at, 4), 13.6), "answer": (13.6, 14.0)}
    assert sum(e - b for b, e in spans.values()) == pytest.approx(14.0)
    assert list(spans) == sorted(spans, key=lambda name: spans[name])


def test_stages_that_an_engine_counts_too_long_end_with_the_request() -> None:
    record = record_of()
    record.timings[0].end = 110.0
    spans = trace_of(record).children
    assert [c.name for c in spans][-2:] == ["deliver", "answer"] and spans[-2].begin == spans[-2].end
    assert sum(c.end - c.begin for c in spans) == pytest.approx(14.0)


def test_a_request_that_was_cut_off_has_what_is_known() -> None:
    record = record_of(error="GatewayTimeoutError")
    record.timings[0].streams[0].stats = None
    names = [c.name for c in trace_of(record).children]
    assert names == ["prepare", "media", "place", "prefill", "decode", "answer"]
    record.timings.clear()
    assert trace_of(record).children == [] and trace_of(record).error == "GatewayTimeoutError"


class Recording:
    """Both halves of the library: keeps what it is sent; no connection while ``away``, nothing if it ``refuses``."""

    def __init__(self) -> None:
        self.made, self.sent, self.tries, self.looks = 0, [], 0, 0
        self.away = self.refuses = False

    def make_spans(self, traces: Sequence[Any]) -> Sequence[Any]:
        self.made += len(traces)
        return traces

    def reachable(self) -> bool:
        self.looks += 1
        return not self.away

    def send(self, spans: Sequence[Any]) -> bool:
        self.tries += 1
        if self.refuses or self.away:
            return False
        self.sent += spans
        return True


def until(true: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_while_the_collector_is_away_the_latest_wait_and_nothing_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_trace_queue, "LONGEST_PAUSE", 0.1)
    library = Recording()
    library.away = True
    traces = TraceQueue("http://collector", lambda: (library, library), every=0.01)
    caplog.set_level("INFO")
    for _ in range(request_trace_queue.MOST + 500):
        traces.add(record_of())
    until(lambda: library.looks >= 3)
    assert not library.made and not library.tries
    assert len(traces._waiting) == request_trace_queue.MOST and traces.dropped == 500
    library.away = False
    until(lambda: not traces._waiting)
    looks = library.looks
    traces.add(record_of())
    traces.close(20)
    assert len(library.sent) == traces.sent == library.made == request_trace_queue.MOST + 1 and traces.dropped == 500
    assert library.looks == looks, "one that takes traces is not asked whether it is there"
    ours = [r.getMessage() for r in caplog.records]
    assert [m.split(" takes ")[1][:9] for m in ours if " takes " in m] == ["no traces", "traces ag"], "a line each"


def test_attempts_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    library, pauses = Recording(), list[float]()
    library.away = True
    traces = TraceQueue("http://collector", lambda: (library, library))
    traces._waiting.append(summarise_request(record_of()))

    def wait(pause: float) -> bool:
        pauses.append(pause)
        library.away = len(pauses) < 10
        return len(pauses) == 12

    monkeypatch.setattr(traces._stop, "wait", wait)
    traces._run()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 1, 1]
    assert library.looks == 10 and library.made == traces.sent == 1


def test_a_batch_is_made_once_and_one_that_is_never_taken_makes_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Recording()
    library.refuses = True
    traces = TraceQueue("http://collector", lambda: (library, library))
    traces._waiting.extend(summarise_request(record_of()) for _ in range(2 * request_trace_queue.AT_A_TIME))
    for attempt in range(request_trace_queue.TRIES):
        assert library.made == (request_trace_queue.AT_A_TIME if attempt else 0)
        assert not traces._attempt(library, library)
    assert traces.dropped == request_trace_queue.AT_A_TIME == len(traces._waiting)
    library.refuses = False
    assert (
        traces._attempt(library, library)
        and traces.sent == library.made - traces.dropped == request_trace_queue.AT_A_TIME
    )
    # What the library cannot make spans of is not tried again.
    traces._waiting.append(summarise_request(record_of()))
    monkeypatch.setattr(library, "make_spans", lambda traces: 1 / 0)
    assert not traces._attempt(library, library) and traces._attempt(library, library)
    assert traces.dropped == request_trace_queue.AT_A_TIME + 1


def test_what_traces_cost_a_request_beside_what_it_costs_anyway(harness: ScriptedApp) -> None:
    """Counted: a hundredth of the work that the API process has with a small request, with a collector that is away."""
    app, body = harness.app(), json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}).encode()
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 5), "scheme": "http",
        "server": ("test", 80), "root_path": "", "raw_path": b"/v1/chat/completions",
    }  # fmt: skip

    async def once() -> int:
        reported: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            return reported.pop() if reported else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await app(dict(scope), receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(once()) == 200
    whole = instructions(lambda: asyncio.run(once()))
    library = Recording()
    library.away = True
    traces = TraceQueue("http://collector", lambda: (library, library), every=600)
    record = record_of(params=SamplingParams())
    traces.add(record)
    own = instructions(lambda: traces.add(record))
    print(f"{own} instructions of {whole} are the trace's")
    assert own <= 0.01 * whole
    traces.close(20)


def test_metrics_tell_what_was_sent_what_was_dropped_and_what_it_took(harness: ScriptedApp) -> None:
    library = Recording()
    harness.app()
    metrics = harness.app().state.trencadis.metrics
    traces = TraceQueue("http://collector", lambda: (library, library), every=0.01)
    metrics.registry.register(TraceCollector(traces))
    traces.add(record_of())
    traces.dropped = 3
    until(lambda: traces.sent == 1 and traces._thread_spent)
    shown = {name: metrics.registry.get_sample_value(f"vllm:traces_{name}_total") for name in
             ("sent", "dropped", "cpu_seconds")}  # fmt: skip
    assert shown["sent"] == 1 and shown["dropped"] == 3 and 0 < shown["cpu_seconds"] < 1
    traces.close(20)


def test_what_waits_is_sent_when_the_server_leaves() -> None:
    library = Recording()
    traces = TraceQueue("http://collector", lambda: (library, library), every=600)
    for _ in range(300):
        traces.add(record_of())
    traces.close(30)
    assert len(library.sent) == 300 and not traces.dropped


def test_a_collector_that_never_answers_does_not_hold_the_end_up() -> None:
    library, held = Recording(), threading.Event()
    library.send = lambda spans: held.wait(600)  # type: ignore[method-assign]
    traces = TraceQueue("http://collector", lambda: (library, library), every=0.01)
    traces.add(record_of())
    begun = time.monotonic()
    traces.close(0.2)
    assert time.monotonic() - begun < 30
    held.set()


@needs_otel
@pytest.mark.parametrize("lie", ["endless", "html", "redirect", "error", "hang up"])
def test_a_collector_that_lies_is_left_alone(collector: Collector, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    reported: list[int] = []

    def answer(handler: Any) -> None:
        if lie == "hang up":
            handler.connection.close()
            return
        status = {"redirect": 307, "error": 400}.get(lie, 200)
        handler.send_response(status)
        handler.send_header("location", collector.url + "/v1/traces")
        handler.end_headers()
        if lie == "html":
            handler.wfile.write(b"<html>not protobuf")
        while lie == "endless":
            reported.append(handler.wfile.write(b"x" * 65536))

    collector.answer = answer
    traces = TraceQueue.for_endpoint(collector.url)
    traces._every = 0.01
    traces.add(record_of())
    until(lambda: collector.bodies)
    traces.close(10)
    assert sum(reported) < 64 << 20, "the answer was not read to its end"
    assert len(collector.bodies) < 50, "a redirect was not followed"


@needs_otel
def test_a_collector_is_there_if_it_takes_a_connection_and_a_proxy_is_not_asked(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trencadis.server.metrics.otel_spans import SpanSender

    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    assert SpanSender(collector.url).reachable() and not collector.bodies
    assert not SpanSender("http://127.0.0.1:9/v1/traces").reachable()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert SpanSender("http://collector.example/v1/traces").reachable()


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    url = request_trace_queue.make_collector_url
    assert url("http://c:4318") == url("http://c:4318/") == "http://c:4318/v1/traces"
    assert url("https://c/own/path?x=1") == "https://c/own/path?x=1"
    for wrong, why in (("grpc://c:4317", "not gRPC"), ("c:4318", "not a URL"), ("http://", "not a URL")):
        with pytest.raises(StartupError, match=why):
            url(wrong)
    monkeypatch.setitem(__import__("sys").modules, "trencadis.server.metrics.otel_spans", None)
    with pytest.raises(StartupError, match=r"pip install 'trencadis\[otel\]'"):
        TraceQueue.for_endpoint("http://c")
