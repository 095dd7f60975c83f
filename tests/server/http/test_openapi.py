"""/openapi.json against what the routes answer. Besides, ``ScriptedApp.call`` checks every answer of all these."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.oracles.declared import check_declared, operation, spec_of
from trencadis.core.errors import QueueFull, Unavailable
from trencadis.core.process.wire import EngineStats
from trencadis.core.progress import Warming
from trencadis.server.admission import Bounds

JSON = {"content-type": "application/json"}
IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
CHAT = {"messages": [{"role": "user", "content": [IMAGE]}]}
GOOD: dict[str, Any] = {
    "/v1/chat/completions": CHAT, "/v1/chat/completions/batch": {"messages": [CHAT["messages"]]},
    "/v1/completions": {"prompt": "Hi"}, "/tokenize": CHAT, "/detokenize": {"tokens": [1]}, "/ping": None,
}  # fmt: skip


def answer(rig: Any, apps: dict[int, Any], path: str, status: int) -> Any:
    """The answer of a POST to ``path`` that has ``status``: what is wrong is brought about first."""
    body, fields = GOOD[path], {"method": "POST", "headers": JSON}
    rig.made = apps.get(status, apps[0])
    rig.images.status = status if status in (409, 415, 422) else 0
    rig.engine.accepting = status != 503
    for name in ("chat_prompt", "raw_prompt", "raw_prompts"):
        vars(rig.service).pop(name, None)
    if status == 500:
        rig.service.chat_prompt = rig.service.raw_prompt = rig.service.raw_prompts = None
        if path == "/detokenize":
            rig.service.tokenizer = None
    if status in (413, 429):
        return rig.call(path, content=b"{} ", **fields)
    if status == 400:
        return rig.call(path, method="POST", content=b"{", headers={"content-type": "text/plain"})
    image = {"type": "image_url", "image_url": "data:text/plain,abc"}
    changes: dict[int, Any] = {
        403: {"chat_template": "x"}, 404: {"model": "nope"},
        501: {"messages": [{"role": "user", "content": [image]}]},
    }  # fmt: skip
    if path.endswith("/batch"):
        changes[501] = {"messages": [changes[501]["messages"]]}
    return rig.call(path, {**body, **changes[status]} if status in changes else body, **fields)


def declared(rig: Any) -> list[tuple[str, str, int]]:
    paths = spec_of(rig.made or rig.app())["paths"]
    return [(p, m, int(s)) for p, ms in paths.items() for m, op in ms.items() for s in op["responses"]]


def test_every_declared_error_of_a_post_is_answered(rig: Any) -> None:
    full = rig.app(bounds=Bounds(body_bytes=10))
    full.state.trencadis.admission.bodies.open().charge(10)
    apps = {401: rig.app(api_key=["k"]), 413: rig.app(max_body_bytes=2), 429: full, 0: rig.app()}
    wanted = [(p, s) for p, method, s in declared(rig) if method == "post" and s >= 400]
    for path, status in wanted:
        assert answer(rig, apps, path, status).status_code == status, (path, status)
    assert len(wanted) > 30


def test_every_declared_error_of_a_get_is_answered(rig: Any) -> None:
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    rig.app(api_key=["k"], metrics_auth=True)
    for path, method, status in declared(rig):
        if method == "get" and status == 401:
            assert rig.call(path.replace("{model}", "m")).status_code == 401, path
        elif method == "get" and status >= 400:
            calls[path, status] = partial(rig.call, path.replace("{model}", "nope"))
    rig.app()
    assert calls.pop(("/v1/models/{model}", 404))().status_code == 404
    rig.engine.accepting = rig.engine.ready = False
    rig.engine.failing = True
    assert calls and all(call().status_code == status for (_, status), call in calls.items())


def test_a_probe_that_tells_of_progress_is_as_declared(rig: Any) -> None:
    rig.engine.stats = EngineStats()
    rig.engine.stats.graphs.warming = Warming(phase="capturing", done=1, total=4)
    assert rig.call("/health").json()["progress"]["total"] == 4


def test_the_description(rig: Any) -> None:
    spec = rig.call("/openapi.json").json()
    text = json.dumps(spec)
    assert "ChatRequest" in text and "HTTPValidationError" not in text and spec == spec_of(rig.app())
    assert list(spec["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    for methods in spec["paths"].values():
        for one in methods.values():
            for status, response in one["responses"].items():
                if int(status) >= 400 and "Probe" not in str(response):
                    schema = response["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
    names = {ref for ref in text.split('"') if ref.startswith("#/components/schemas/")}
    assert {ref.rpartition("/")[2] for ref in names} <= set(spec["components"]["schemas"])
    assert rig.call("/docs").status_code == 200
    rig.app(disable_fastapi_docs=True)
    assert rig.call("/openapi.json").status_code == 404


def test_streams_are_declared_as_events(rig: Any) -> None:
    for response in (rig.chat(stream=True), rig.complete(stream=True)):
        assert response.headers["content-type"].startswith("text/event-stream")


def test_the_check_finds_what_is_not_declared(rig: Any) -> None:
    app = rig.app()
    found = operation(spec_of(app), "POST", "/v1/chat/completions")
    assert found is not None and operation(spec_of(app), "GET", "/nope") is None
    changes: list[Callable[[Any], Any]] = [
        lambda r: setattr(r, "status_code", 418),
        lambda r: r.headers.update({"content-type": "text/html"}),
        lambda r: setattr(r, "_content", b'{"id": "x"}'),
    ]
    for change in changes:
        response = rig.chat()
        change(response)
        with pytest.raises(AssertionError):
            check_declared(app, response)


def test_an_engine_that_refuses_says_when_to_come_back(rig: Any) -> None:
    for error in (QueueFull("full", retry_after=3), Unavailable("gone", retry_after=4)):
        rig.engine.refuse = error
        assert rig.chat().headers["retry-after"] == str(error.retry_after)
