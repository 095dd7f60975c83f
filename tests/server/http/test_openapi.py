"""/openapi.json against what the routes answer. Besides, ``ScriptedApp.call`` checks every answer of all these."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jsonschema
import pytest

from tests.oracles.openapi_checks import check_declared, operation, spec_of
from trencadis.core.errors import QueueFull, Unavailable
from trencadis.core.process.engine_messages import EngineStats
from trencadis.core.startup_progress_and_warmup_pacing import Warming
from trencadis.server.tenants.server_admission_and_byte_budgets import Bounds

JSON = {"content-type": "application/json"}
IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CHAT = {"messages": [{"role": "user", "content": [IMAGE]}]}
GOOD: dict[str, Any] = {
    "/v1/chat/completions": CHAT, "/v1/chat/completions/batch": {"messages": [CHAT["messages"]]},
    "/v1/completions": {"prompt": "Hi"}, "/tokenize": CHAT,
    "/detokenize": {"tokens": [1]}, "/ping": None,
    "/v1/responses": {"input": CHAT["messages"]}, "/v1/responses/input_tokens": {"input": CHAT["messages"]},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
}  # fmt: skip


def test_what_the_routes_answer_is_what_they_declare(harness: Any) -> None:
    spec = spec_of(harness.app())
    for path, body in GOOD.items():
        described = operation(spec, "POST", path) or {}
        content = described.get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None and content:
            jsonschema.validate(body, {**content["schema"], "components": spec["components"]})


def answer(harness: Any, apps: dict[int, Any], path: str, status: int) -> Any:
    """The answer of a POST to ``path`` that has ``status``: what is wrong is brought about first."""
    body: Any = GOOD[path]
    fields = {"method": "POST", "headers": JSON}
    harness.made = apps.get(status, apps[0])
    harness.images.status = status if status in (409, 415, 422) else 0
    harness.engine.accepting = status != 503
    for name in ("make_chat_prompt", "make_raw_prompt", "make_raw_prompts"):
        vars(harness.service).pop(name, None)
    if status == 500:
        harness.service.make_chat_prompt = harness.service.make_raw_prompt = harness.service.make_raw_prompts = None
        if path == "/detokenize":
            harness.service.tokenizer = None
    if status in (413, 429, 529):
        return harness.call(path, content=b"{} ", **fields)
    if status == 400:
        return harness.call(path, method="POST", content=b"{", headers={"content-type": "text/plain"})
    address = "data:text/plain,abc"
    image: Any = {"type": "image_url", "image_url": address}
    if "messages" in path:
        image = {"type": "image", "source": {"type": "url", "url": address}}
    conversation = [{"role": "user", "content": [image]}]
    said = "input" if "responses" in path else "messages"
    changes: dict[int, Any] = {404: {"model": "nope"}, 501: {said: conversation}}
    if path.endswith("/batch"):
        changes[501] = {"messages": [conversation]}
    return harness.call(path, {**body, **changes[status]} if status in changes else body, **fields)


def declared(harness: Any) -> list[tuple[str, str, int]]:
    paths = spec_of(harness.made or harness.app())["paths"]
    return [(p, m, int(s)) for p, ms in paths.items() for m, op in ms.items() for s in op["responses"]]


def test_every_declared_error_of_a_post_is_answered(harness: Any) -> None:
    full = harness.app(bounds=Bounds(body_bytes=10))
    full.state.trencadis.admission.bodies.open().charge(10)
    apps = {401: harness.app(api_key=["k"]), 413: harness.app(max_body_bytes=2), 429: full, 529: full}
    apps |= {
        403: harness.app(host="127.0.0.1"),
        431: harness.app(h11_max_header_count=1),
        504: harness.app(request_timeout=1e-9),
        0: harness.app(),
    }
    # A key's own limit, which is a 429 of these paths too, is tested with the tenants.
    wanted = [
        (p, s)
        for p, method, s in declared(harness)
        if method == "post" and s >= 400 and not (s == 429 and "messages" in p)
    ]
    for path, status in wanted:
        assert answer(harness, apps, path, status).status_code == status, (path, status)
    assert len(wanted) > 30


def test_every_declared_error_of_a_get_is_answered(harness: Any) -> None:
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    harness.app(api_key=["k"], metrics_auth=True)
    crowded: list[str] = []
    foreign: list[str] = []
    for path, method, status in declared(harness):
        if method == "get" and status == 401:
            assert harness.call(path.replace("{model}", "m")).status_code == 401, path
        elif method == "get" and status == 403:
            foreign.append(path.replace("{model}", "m"))
        elif method == "get" and status == 431:
            crowded.append(path.replace("{model}", "m"))
        elif method == "get" and status >= 400:
            calls[path, status] = partial(harness.call, path.replace("{model}", "nope"))
    harness.app()
    assert calls.pop(("/v1/models/{model}", 404))().status_code == 404
    harness.engine.accepting = harness.engine.ready = False
    harness.engine.failing = True
    assert calls and all(call().status_code == status for (_, status), call in calls.items())
    harness.app(h11_max_header_count=1)
    assert crowded and all(harness.call(path).status_code == 431 for path in crowded)
    harness.app(host="127.0.0.1")
    assert foreign and all(harness.call(path).status_code == 403 for path in foreign)


def test_a_probe_that_tells_of_progress_is_as_declared(harness: Any) -> None:
    harness.engine.stats = EngineStats()
    harness.engine.stats.graphs.warming = Warming(phase="capturing", done=1, total=4)
    assert harness.call("/health").json()["progress"]["total"] == 4


def test_the_description_is_written_once_and_beside_the_event_loop(harness: Any) -> None:
    app, threads = harness.app(), list[str]()
    plain = app.openapi

    def openapi() -> Any:
        threads.append(threading.current_thread().name)
        return plain()

    app.openapi = openapi
    assert harness.call("/openapi.json").content == harness.call("/openapi.json").content
    assert len(threads) == 1 and threads[0] != "MainThread"


def test_the_description(harness: Any) -> None:
    spec = harness.call("/openapi.json").json()
    text = json.dumps(spec)
    assert "ChatRequest" in text and "HTTPValidationError" not in text and spec == spec_of(harness.app())
    assert list(spec["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    for path, methods in spec["paths"].items():
        for one in methods.values():
            for status, response in one["responses"].items():
                if int(status) >= 400 and "Probe" not in str(response):
                    schema = response["content"]["application/json"]["schema"]
                    name = "MessagesError" if "/v1/messages" in path else "ErrorResponse"
                    assert schema == {"$ref": f"#/components/schemas/{name}"}
    names = {ref for ref in text.split('"') if ref.startswith("#/components/schemas/")}
    assert {ref.rpartition("/")[2] for ref in names} <= set(spec["components"]["schemas"])
    assert harness.call("/docs").status_code == 200
    harness.app(disable_fastapi_docs=True)
    assert harness.call("/openapi.json").status_code == 404


def test_streams_are_declared_as_events(harness: Any) -> None:
    for response in (harness.chat(stream=True), harness.complete(stream=True)):
        assert response.headers["content-type"].startswith("text/event-stream")


def test_the_check_finds_what_is_not_declared(harness: Any) -> None:
    app = harness.app()
    found = operation(spec_of(app), "POST", "/v1/chat/completions")
    assert found is not None and operation(spec_of(app), "GET", "/nope") is None
    changes: list[Callable[[Any], Any]] = [
        lambda r: setattr(r, "status_code", 418),
        lambda r: r.headers.update({"content-type": "text/html"}),
        lambda r: setattr(r, "_content", b'{"id": "x"}'),
    ]
    for change in changes:
        response = harness.chat()
        change(response)
        with pytest.raises(AssertionError):
            check_declared(app, response)


def test_an_engine_that_refuses_says_when_to_come_back(harness: Any) -> None:
    for error in (QueueFull("full", retry_after=3), Unavailable("gone", retry_after=4)):
        harness.engine.refuse = error
        assert harness.chat().headers["retry-after"] == str(error.retry_after)


def test_a_path_of_two_methods_allows_both(harness: Any) -> None:
    response = harness.call("/ping", method="DELETE")
    assert response.status_code == 405 and {*response.headers["allow"].split(", ")} == {"GET", "POST"}


BESIDE: dict[str, dict[str, Any]] = {
    "n": {"temperature": 1}, "top_logprobs": {"logprobs": True}, "tools": {"tool_choice": "none"},
    "max_tokens": {"prompt_logprobs": 1}, "max_completion_tokens": {"prompt_logprobs": 1},
    "min_tokens": {"max_tokens": 9},
}  # fmt: skip
"""Other fields without which a value is refused for another reason."""
ELSEWHERE = {("n", "maximum"), ("top_k", "maximum"), ("chat_template", "maxLength"), ("tools", "maxItems"),
             ("messages", "maxItems"), ("logprobs", "minimum"), ("top_logprobs", "minimum"),
             ("prompt_logprobs", "minimum")}  # fmt: skip
"""Bounds at which something else refuses: the limit of the server, or a field that needs a flag."""
MAKE: dict[str, Callable[[int], Any]] = {
    "minimum": lambda n: n, "maximum": lambda n: n, "exclusiveMinimum": lambda n: n, "minLength": lambda n: "x" * n,
    "maxLength": lambda n: "x" * n,
}  # fmt: skip
ITEMS = {"messages": {"role": "user", "content": ""}, "stop": "x", "stop_token_ids": 1, "documents": {},
         "modalities": "text", "tools": {"function": {"name": "f"}}, "prompt": 5}  # fmt: skip


def limits(schema: dict[str, Any]) -> list[tuple[str, int]]:
    """(keyword, value) of the bounds of a field, but for those of 64-bit numbers."""
    keywords = (*MAKE, "minItems", "maxItems")
    found = [(k, b[k]) for b in schema.get("anyOf", [schema]) for k in keywords if k in b]
    return [(k, n) for k, n in found if abs(n) < 2**62]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_every_described_bound_is_one(harness: Any, path: str) -> None:
    spec = spec_of(harness.app())
    ref = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    base = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    beside = BESIDE if "chat" in path else {**BESIDE, "max_tokens": {"echo": True}}
    tried = 0
    for field, schema in spec["components"]["schemas"][ref.rpartition("/")[2]]["properties"].items():
        for keyword, value in limits(schema):
            step = -1 if keyword.startswith("min") else 0 if keyword.startswith("excl") else 1
            for n, good in ((value, step != 0), (value + step, False)):
                if (n < 0 and keyword not in MAKE) or (good and (field, keyword) in ELSEWHERE):
                    continue
                made = MAKE[keyword](n) if keyword in MAKE else [ITEMS[field]] * n
                body = {**base, **beside.get(field, {}), field: made, "cache_salt": "s"}
                response = harness.call(path, body if field != "cache_salt" else {**body, field: made})
                assert (response.status_code < 400) == good, (field, keyword, n, response.text[:200])
                tried += 1
    assert tried > (30 if "v1" in path else 4)
