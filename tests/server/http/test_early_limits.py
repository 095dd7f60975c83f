"""What a client can make the server hold or count before its request is understood."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import BY_STATUS
from trencadis.core.graph_and_bucket_learning_report import MEANINGS, OUTCOMES, UNPLANNED
from trencadis.core.process.engine_messages import BucketUse, EngineInfo, EngineStats
from trencadis.server.metrics.bucket_metrics import MOST
from trencadis.server.metrics.prometheus import make_cache_labels
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
JSON = {"content-type": "application/json"}


def test_the_tenant_is_the_key_that_let_the_request_in(harness: Any) -> None:
    harness.app(api_key=["a", "b"])
    seen = []
    for headers in (
        {"authorization": "Bearer a"}, {"x-api-key": "a"},
        {"authorization": "Bearer a", "x-api-key": "chosen"}, {"authorization": "Bearer chosen", "x-api-key": "a"},
        {"authorization": "Bearer a", "x-api-key": "b"}, {"x-api-key": "b"},
    ):  # fmt: skip
        body = {"messages": [{"role": "user", "content": [IMAGE]}]}
        assert harness.call("/v1/chat/completions", body, headers=headers).status_code == 200
        seen.append(harness.images.scope.tenant)
    assert len(set(seen[:4])) == 1 and seen[5] not in seen[:4]
    assert seen[4] in (seen[0], seen[5]), "two valid keys: one of them"


def asgi(app: Any, method: str, path: str, headers: dict[str, str], *bodies: bytes | float) -> list[Message]:
    """What the application sends for a request whose body comes in pieces; a number is a pause in seconds, and after
    the last piece nothing ever comes unless it is b""."""
    sent: list[Message] = []
    left = list(bodies)

    async def receive() -> Message:
        while left and isinstance(left[0], float):
            await asyncio.sleep(left.pop(0))  # type: ignore[arg-type]
        if not left:
            await asyncio.sleep(3600)
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": piece != b""}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "server": ("t", 80),
        "client": ("c", 1), "headers": [(k.encode(), v.encode()) for k, v in headers.items()], "state": {},
    }  # fmt: skip

    async def main() -> None:
        await asyncio.wait_for(app(scope, receive, send), 20)

    asyncio.run(main())
    return sent


def status(sent: list[Message]) -> int:
    return int(sent[0]["status"])


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "FROBNICATE"])
def test_an_announced_body_is_checked_whatever_the_method(harness: Any, method: str) -> None:
    app = harness.app(max_body_bytes=1000, api_key=["k"])
    bodies = harness.made.state.trencadis.admission.bodies
    charged = []
    plain = bodies.open

    def watched() -> Any:
        body = plain()
        charge = body.charge
        body.charge = lambda count: (charged.append(count), charge(count))
        return body

    bodies.open = watched
    sent = asgi(app, method, "/health", {"content-length": str(10**12)})
    assert status(sent) == 413 and not any(charged)
    assert status(asgi(app, method, "/health", {"content-length": "9" * 5000})) == 413


def test_what_is_announced_and_never_comes_costs_others_nothing(harness: Any) -> None:
    app = harness.app(bounds=Bounds(body_bytes=1 << 20))
    bodies = harness.made.state.trencadis.admission.bodies
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()

    async def silent() -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    async def main() -> list[Message]:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"1000000")], "state": {},
        }  # fmt: skip

        async def nowhere(message: Message) -> None:
            pass

        tasks = [asyncio.create_task(app(dict(scope), silent, nowhere)) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert bodies.inside == 0
        pieces = [body, b""]
        sent: list[Message] = []

        async def receive() -> Message:
            if not pieces:
                await asyncio.sleep(3600)
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(piece)}

        async def send(message: Message) -> None:
            sent.append(message)

        await app(dict(scope) | {"headers": [(b"content-type", b"application/json")]}, receive, send)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return sent

    assert status(asyncio.run(main())) == 200


def test_a_body_that_stands_still_or_crawls_is_408(harness: Any) -> None:
    app = harness.app(receive_timeout=0.4)
    begin, end = b'{"messages": [{"role": "user", ', b'"content": "Hi"}]}'
    for pieces in ([begin], [], [begin, *(0.04, b" ") * 50]):
        sent = asgi(app, "POST", "/v1/chat/completions", JSON, *pieces)
        assert status(sent) == 408 and (b"connection", b"close") in sent[0]["headers"]
        error = json.loads(sent[1]["body"])["error"]
        assert error["type"] == "RequestTimeoutError" and error["code"] == 408
    assert harness.made.state.trencadis.admission.bodies.inside == 0
    assert status(asgi(app, "POST", "/v1/chat/completions", JSON, begin, 0.05, end, b"")) == 200


def test_waiting_for_an_answer_is_not_waiting_for_a_body(harness: Any) -> None:
    app = harness.app(receive_timeout=0.05)
    harness.engine.delay = 0.03
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    assert status(asgi(app, "POST", "/v1/chat/completions", JSON, body, b"")) == 200


ALLOWED: dict[str, set[str]] = {
    "model_name": {"m"},
    "engine": {"0"},
    "method": {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "other"},
    "status": {"2xx", "4xx", "5xx"},
    "finished_reason": {"stop", "length", "abort", "error", "repetition"},
    "cache": {"processor", "encoder", "prefix"},
    "unit": {"requests", "tokens", "pixels"},
    "position": {str(place) for place in range(16)},
    "stage": {"turn", "queue", "encode", "prefill", "decode", "media_fetch", "media_decode", "media_resize"},
    "device": {"cpu"},
    "outcome": set(OUTCOMES),
    "source": {
        "local_compute",
        "local_cache_hit",
        "external_kv_transfer",
        "device",
        "host",
        "p2p",
        "disk",
        "external_unspecified",
    },
    "sleep_state": {"awake", "weights_offloaded", "discard_all"},
    "role": {"api", "engine", "rank", "decode_worker", "other"},
    "generation": {"0", "1", "2"},
}
ONE_VALUE = {"implementation", "major", "minor", "patchlevel", "version"} | make_cache_labels(
    EngineConfig(), EngineInfo("cpu", "float32", 64, 16, 4, 10, 0)
).keys()
"""Labels of an info family: a process has one value."""


def samples(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, dict(sample.labels)


def test_every_label_has_a_bounded_set_of_values(harness: Any) -> None:
    app = harness.app(allowed_origins=["*"])
    state = harness.made.state.trencadis
    for i in range(30):
        asgi(app, f"M{i}", "/health", {})
        asgi(app, "GET", f"/path{i}", {})
        asgi(app, f"N{i}", f"/path{i}", {"host": f"h{i}", "x-request-id": f"r{i}"})
        harness.call(f"/v1/models/none{i}")
        harness.chat([{"type": "image_url", "image_url": f"data:image/png;base64,bad{i}"}], model="m", user=f"u{i}")
        harness.complete(f"p{i}", model=f"none{i}")
    harness.chat(stop=["wör"])
    harness.chat(max_tokens=1, stream=True)
    harness.engine.fail_at = 1
    harness.chat()
    odd = [BucketUse("prefill", i, i, 0.1, f"prefill[{i}]", "", False, UNPLANNED) for i in range(300)]
    harness.engine.observers[0](EngineStats(buckets=[BucketUse("decode", 3, 4, 0.1), *odd]))
    routes = {getattr(r, "path", "") for r in routes_of(app)}
    reasons = {*state.admission.rejected, *MEANINGS, *(error.type for error in BY_STATUS.values())}
    reasons |= {"capacity", "deferred", "turn"}
    allowed = ALLOWED | {"handler": routes | {"other"}, "reason": reasons}
    found: dict[str, set[str]] = {}
    for _, labels in samples(state.metrics.format_text().decode()):
        for name, value in labels.items():
            found.setdefault(name, set()).add(value)
    found.pop("le")
    assert len(found.pop("bucket")) == MOST + 2, "the first sizes outside a plan, and one name for all others"
    for name, values in found.items():
        if name in ONE_VALUE:
            assert len(values) == 1, (name, values)
        else:
            assert values <= allowed[name], (name, sorted(values - allowed[name])[:5])
    assert found["method"] >= {"GET", "POST", "other"} and found["finished_reason"] >= {"stop", "length", "error"}


def routes_of(app: Any) -> Iterator[Any]:
    from fastapi import routing

    yield from getattr(routing, "iter_route_contexts", iter)(app.routes)


def test_the_process_and_its_interpreter_are_among_the_metrics(harness: Any) -> None:
    text = harness.call("/metrics").text
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds",
                 "process_start_time_seconds", "python_gc_collections_total", "python_info"):  # fmt: skip
        assert f"\n{name}" in text, name
