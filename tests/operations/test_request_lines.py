"""The log's lines of a request: one access and one closing line, what stands in them, and what never does."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.operations.conftest import JsonLog
from trencadis.core.errors import Unavailable
from trencadis.core.process import log_setup

SECRET = "the-secret-of-a-user"


def test_one_access_and_one_closing_line_a_request(harness: ScriptedApp, json_log: JsonLog) -> None:
    said = harness.chat("Hi", max_tokens=3)
    stream = harness.chat("Hi", max_tokens=3, stream=True)
    several = harness.complete(["Hi", "Ho", "He"], max_tokens=2, n=2, temperature=1)
    access, closing = json_log.of("access"), json_log.of("closing")
    answers = (said, stream, several)
    assert [one["id"] for one in access] == [a.headers["x-request-id"] for a in answers]
    assert [one["id"] for one in closing] == [a.headers["x-request-id"] for a in answers]
    assert [one["status"] for one in access] == [200, 200, 200]
    assert access[0]["path"] == "/v1/chat/completions" and access[0]["method"] == "POST"
    assert closing[0]["answer"] == said.json()["id"] == f"chatcmpl-{closing[0]['id']}"
    usage = said.json()["usage"]
    assert closing[0]["prompt_tokens"] == usage["prompt_tokens"] and closing[0]["generated_tokens"] == 3
    assert closing[0]["cached_tokens"] == 3 and closing[0]["outcome"] == "length"
    assert closing[0]["stages"] == {"queue": 0.1, "prefill": 0.2, "decode": 0.3}
    assert 0 < closing[0]["first_token_seconds"] <= closing[0]["seconds"]
    assert closing[2]["prompt_tokens"] == several.json()["usage"]["prompt_tokens"]
    assert closing[2]["generated_tokens"] == several.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_closing_line_names_the_error(harness: ScriptedApp, json_log: JsonLog, stream: bool) -> None:
    harness.engine.fail_at = 1
    harness.chat("Hi", max_tokens=3, stream=stream)
    harness.engine.refuse = Unavailable("The engine is away.")
    harness.chat("Hi", max_tokens=3, stream=stream)
    harness.engine.refuse = None
    harness.chat("Hi", max_tokens=-1, stream=stream)
    closing = json_log.of("closing")
    assert [one["outcome"] for one in closing] == [
        "ServiceUnavailableError",
        "ServiceUnavailableError",
        "BadRequestError",
    ]
    statuses = [200 if stream else 503, 503, 400]
    assert [one["status"] for one in closing] == statuses == [one["status"] for one in json_log.of("access")]
    assert "prompt_tokens" in closing[1] and "prompt_tokens" not in closing[2]


def test_a_request_that_did_not_run_has_a_closing_line_too(harness: ScriptedApp, json_log: JsonLog) -> None:
    harness.engine.accepting = False
    harness.chat("Hi")
    (closing,) = json_log.of("closing")
    assert closing["outcome"] == "ServiceUnavailableError" and "prompt_tokens" not in closing


def test_buckets_of_the_slowest_choice(harness: ScriptedApp, json_log: JsonLog, monkeypatch: Any) -> None:
    from trencadis.core.request import RequestStats

    stats = RequestStats(0.1, 0.2, 0.3, first_buckets=["vision[64]", "prefill[32x1]"], last_buckets=["decode[4x8]"])
    monkeypatch.setattr("tests.fakes.scripted_app.RequestStats", lambda *_: stats)
    harness.chat("Hi", max_tokens=3)
    (closing,) = json_log.of("closing")
    assert closing["buckets"] == {"first": ["vision[64]", "prefill[32x1]"], "last": ["decode[4x8]"]}
    assert "buckets vision[64]+prefill[32x1], decode[4x8]" in closing["message"]


def test_probes_have_no_closing_line_and_queries_stay_out_of_the_access_line(
    harness: ScriptedApp, json_log: JsonLog
) -> None:
    harness.call(f"/v1/models?api_key={SECRET}")
    harness.call("/health")
    harness.call("/odd%0apath\u00e9")
    assert not json_log.of("closing")
    assert [one["path"] for one in json_log.of("access")] == ["/v1/models", "/health", "/odd%0Apath%C3%A9"]
    assert SECRET not in "".join(json_log.text)


def test_contents_stand_in_the_log_only_if_they_are_asked_for(harness: ScriptedApp, json_log: JsonLog) -> None:
    said = harness.chat(SECRET, max_tokens=4).json()["choices"][0]["message"]["content"]
    harness.app(enable_log_requests=True)
    harness.chat(SECRET, max_tokens=4)
    (received,) = json_log.of("received")
    assert received["params"]["max_tokens"] == 4 and received["prompt_tokens"] > 3
    everything = "".join(json_log.text)
    assert SECRET not in everything and json.dumps(said)[1:-1] not in everything
    harness.app(enable_log_requests=True, enable_log_outputs=True)
    harness.chat([{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": "data:image/png;base64,A"}],
             max_tokens=4, n=2, temperature=1)  # fmt: skip
    shown = json_log.of("received")[-1]["prompt"]
    assert SECRET in shown and shown.count("<|image_pad|>") == 1, "six placeholders are one image"
    assert json_log.of("closing")[-1]["outputs"] == [said, said]
    assert json.dumps(said) in json_log.of("closing")[-1]["message"]


@pytest.mark.parametrize("most", [0, 5])
def test_max_log_len_cuts_prompts_and_answers(harness: ScriptedApp, json_log: JsonLog, most: int) -> None:
    harness.app(enable_log_outputs=True, max_log_len=most)
    harness.chat("Hello " * 50, max_tokens=8)
    assert len(json_log.of("received")[0]["prompt"]) == most
    assert len(json_log.of("closing")[0]["outputs"][0]) == most


def test_a_client_that_goes_ends_with_one_closing_line(harness: ScriptedApp, json_log: JsonLog) -> None:
    harness.engine.delay = 0.01
    app = harness.app()
    gone = asyncio.Event()
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": False}).encode()

    async def run() -> None:
        requested = False

        async def receive() -> dict[str, Any]:
            nonlocal requested
            if not requested:
                requested = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("nobody is there")

        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 5), "scheme": "http",
            "server": ("test", 80), "root_path": "", "raw_path": b"/v1/chat/completions",
        }  # fmt: skip
        asyncio.get_running_loop().call_later(0.05, gone.set)
        await app(scope, receive, send)

    asyncio.run(run())
    (access,), (closing,) = json_log.of("access"), json_log.of("closing")
    assert access["status"] == 499 and access["client"] == "127.0.0.1:5"
    assert closing["outcome"] == "abort" and closing["prompt_tokens"] > 0


def test_batches_and_pooled_ids_are_one_request(harness: ScriptedApp, json_log: JsonLog) -> None:
    body = {"messages": [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]], "max_tokens": 2}
    assert harness.call("/v1/chat/completions/batch", body).status_code == 200
    (closing,) = json_log.of("closing")
    assert closing["generated_tokens"] == 4


def test_dialects_have_the_same_lines(harness: ScriptedApp, json_log: JsonLog) -> None:
    harness.call("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "model": "m"})
    harness.call("/v1/responses", {"input": "Hi", "max_output_tokens": 3})
    first, second = json_log.of("closing")
    assert first["generated_tokens"] == second["generated_tokens"] == 3
    assert first["answer"].startswith("msg_") and second["answer"].startswith("resp_")


def test_lines_for_people_say_the_same(harness: ScriptedApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        reported = harness.chat("Hi", max_tokens=3)
    id = reported.headers["x-request-id"]
    access = next(r.getMessage() for r in caplog.records if r.name == "uvicorn.access")
    assert access.split(", ")[0].endswith('"POST /v1/chat/completions HTTP/1.1" 200') and f"request {id}" in access
    assert any(
        m.startswith(f"request chatcmpl-{id}: ") and "3 generated" in m and "queue 0.100" in m
        for m in caplog.messages
    )  # fmt: skip


def test_json_lines_are_one_object_each(capsys: pytest.CaptureFixture[str]) -> None:
    log_setup.setup("INFO", "json")
    log = logging.getLogger("trencadis.server.cli.serve")
    log.info("two\nlines and a surrogate \ud800 of %s", "x", extra={"fields": lambda: {"id": "a", "odd": object}})
    try:
        raise ValueError("of ours")
    except ValueError:
        log.exception("failed")
    logging.getLogger().handlers[0].flush()
    first, second = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert first["message"] == "two\nlines and a surrogate \ud800 of x" and first["id"] == "a"
    assert first["level"] == "INFO" and first["logger"] == "server" and first["time"].endswith("Z")
    assert second["exception"].rstrip().endswith("ValueError: of ours")


def test_ids_of_answers_follow_the_header(harness: ScriptedApp) -> None:
    reported: httpx.Response = harness.chat("Hi", max_tokens=1)
    assert reported.json()["id"] == f"chatcmpl-{reported.headers['x-request-id']}"
    named = harness.call(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        headers={"x-request-id": "abc"},
    )  # fmt: skip
    assert named.json()["id"] == "chatcmpl-abc" and named.headers["x-request-id"] == "abc"
