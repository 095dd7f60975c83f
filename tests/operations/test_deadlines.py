"""``--request-timeout`` and ``x-request-timeout``: 504 in form, and nothing that goes on behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_app import FakeImages, ScriptedApp
from tests.operations.conftest import JsonLog
from tests.traffic.live_app import live
from trencadis.server.metrics.request_record_logs_and_metrics import RECORD, RequestRecord
from trencadis.server.routes import sse

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True}
FAR = {"x-request-timeout": "500"}
SOON = {"x-request-timeout": "0.15"}
CHAT = "/v1/chat/completions"


def late_after(harness: ScriptedApp, tokens: int) -> None:
    """Time is up once the engine has given ``tokens`` tokens, however fast this machine is; then it gives no more."""
    usual = harness.engine._deltas

    async def deltas(request: Any) -> AsyncIterator[Any]:
        count = 0
        async for delta in usual(request):
            if count == tokens:
                record = RECORD.get()
                assert record is not None and record.timer is not None
                record.timer.reschedule(asyncio.get_running_loop().time())
                await asyncio.sleep(600)
            count += 1
            yield delta

    harness.engine._deltas = deltas  # type: ignore[method-assign]


def ended(harness: ScriptedApp) -> None:
    """The engine was told to stop, and what the request held is given back."""
    ids = {request.id for request, _ in harness.engine.submitted}
    assert ids and {id for id, _ in harness.engine.aborted} == ids
    assert harness.made is not None and harness.made.state.trencadis.admission.inside == [0, 0, 0]


@pytest.mark.parametrize(("flags", "headers"), [({"request_timeout": 500.0}, {}), ({}, FAR)])
def test_a_whole_answer_that_is_late_is_a_504(
    harness: ScriptedApp, json_log: JsonLog, flags: dict[str, float], headers: dict[str, str]
) -> None:
    harness.app(**flags)  # type: ignore[arg-type]
    late_after(harness, 2)
    reported = harness.call(CHAT, BODY, headers=headers)
    assert reported.status_code == 504 and reported.headers["x-should-retry"] == "false"
    error = reported.json()["error"]
    assert error["type"] == "GatewayTimeoutError" and error["message"].endswith("within its 500 seconds.")
    (closing,) = json_log.of("closing")
    assert closing["outcome"] == "GatewayTimeoutError" and closing["status"] == 504
    assert closing["generated_tokens"] == 2
    ended(harness)


@pytest.mark.parametrize("keep_alive", [0.0, 0.05])
def test_a_stream_that_is_late_ends_in_form(harness: ScriptedApp, json_log: JsonLog, keep_alive: float) -> None:
    harness.app(sse_keep_alive_interval=keep_alive)
    late_after(harness, 2)
    reported = harness.call(CHAT, BODY | {"stream": True}, headers=FAR)
    lines = [line for line in reported.text.split("\n\n") if not line.startswith(":")]
    assert reported.status_code == 200 and lines[-2:] == ["data: [DONE]", ""]
    assert json.loads(lines[-3][6:])["error"]["code"] == 504 and json.loads(lines[0][6:])["choices"]
    assert json_log.of("closing")[0]["outcome"] == "GatewayTimeoutError"
    ended(harness)


def test_streams_of_other_apis_end_in_their_forms(harness: ScriptedApp) -> None:
    late_after(harness, 2)
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "model": "m", "stream": True}
    text = harness.call("/v1/messages", messages, headers=FAR).text
    assert text.rstrip().split("\n\n")[-1].startswith("event: error\ndata: ")
    text = harness.call("/v1/responses", {"input": "Hi", "max_output_tokens": 200, "stream": True}, headers=FAR).text
    assert text.rstrip().split("\n\n")[-1].startswith("event: response.failed\ndata: ")
    ended(harness)


def test_the_wait_for_media_counts(harness: ScriptedApp) -> None:
    begun = time.monotonic()

    class Slow(FakeImages):
        async def prepare(self, parts: Any, scope: Any) -> Any:
            await asyncio.sleep(600)

    harness.service.images = Slow()  # type: ignore[assignment]
    content = [{"type": "image_url", "image_url": "data:image/png;base64,A"}]
    reported = harness.call(CHAT, {"messages": [{"role": "user", "content": content}]}, headers=SOON)
    assert reported.status_code == 504 and time.monotonic() - begun < 30
    assert not harness.engine.submitted and harness.made.state.trencadis.admission.inside == [0, 0, 0]  # type: ignore[union-attr]


def test_the_wait_for_the_body_counts(harness: ScriptedApp) -> None:
    harness.app(request_timeout=0.2)
    with live(harness) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as s:
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            s.sendall(b"content-length: 100\r\n\r\n{")
            assert s.recv(100).startswith(b"HTTP/1.1 504")


def test_a_client_that_does_not_read_holds_nothing(harness: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the stream cannot be sent; what made it has ended all the same."""
    monkeypatch.setattr("trencadis.server.routes.sse.TIMEOUT_FLUSH_SECONDS", 0.05)
    events, released = [], []

    async def made() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            events.append("ended")

    async def run() -> None:
        record = RequestRecord("r")
        record.deadline = asyncio.get_running_loop().time() + 0.2
        stream = sse.EventStream(made(), done=lambda: released.append(1))
        full = asyncio.Event()
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > 5:
                await full.wait()  # as uvicorn does while the client reads nothing

        async def receive() -> Any:
            await full.wait()

        await stream({"type": "http", "trencadis.record": record}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert events == ["ended"] and released == [1]


@pytest.mark.parametrize("written", ["0", "-1", "soon", "nan", "inf", "", "1e999", "0x10"])
def test_a_header_that_is_no_number_of_seconds(harness: ScriptedApp, written: str) -> None:
    reported = harness.call(CHAT, BODY | {"max_tokens": 1}, headers={"x-request-timeout": written})
    assert reported.status_code == 400 and reported.json()["error"]["param"] == "x-request-timeout"


def test_the_smaller_of_both_counts(harness: ScriptedApp) -> None:
    harness.app(request_timeout=0.15)
    harness.engine.delay = 0.02
    assert harness.call(CHAT, BODY, headers=FAR).status_code == 504
    harness.app(request_timeout=50)
    assert harness.call(CHAT, BODY, headers=SOON).status_code == 504
    assert harness.call(CHAT, BODY | {"max_tokens": 2}, headers=FAR).status_code == 200


def test_a_timeout_of_ours_on_another_machine_is_no_deadline(
    harness: ScriptedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(harness.engine, "submit", broken)
    assert harness.call(CHAT, BODY, headers={"x-request-timeout": "50"}).status_code == 500


def test_probes_have_no_deadline(harness: ScriptedApp) -> None:
    harness.app(request_timeout=1e-6)
    assert harness.call("/health").status_code == 200
    assert harness.call(CHAT, BODY).status_code == 504


def test_over_a_socket_the_connection_serves_on(harness: ScriptedApp) -> None:
    harness.engine.delay = 0.02
    with live(harness) as url, httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        assert http.post(CHAT, json=BODY, headers=SOON).status_code == 504
        assert http.get("/health").status_code == 200
