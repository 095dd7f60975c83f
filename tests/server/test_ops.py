"""Probes, models, tokens, keys, envelopes, limits, metrics."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import Any

import pytest

from trencadis.core.process.engine_messages import BucketUse, EngineStats
from trencadis.server.metrics.prometheus import ThroughputLog, make_preemption_warning
from trencadis.server.routes.health_and_metrics import PageCache

JSON = {"content-type": "application/json"}
PROBES = ("/health", "/live", "/ready", "/ping", "/version")


def envelope(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert len(error["message"]) < 200 and response.headers["x-request-id"]
    return dict(error)


def test_probes(harness: Any) -> None:
    assert all(harness.call(path).status_code == 200 for path in PROBES)
    assert harness.call("/ping", method="POST", headers=JSON).status_code == 200
    assert harness.call("/version").json()["version"]
    engine = harness.engine
    engine.phase, engine.accepting, engine.ready, engine.info = "loading weights", False, False, None
    for path, status in {"/health": 503, "/ready": 503, "/ping": 503, "/live": 200, "/version": 200}.items():
        assert harness.call(path).status_code == status
    assert harness.call("/health").json()["phase"] == "loading weights"
    engine.accepting, engine.healthy = True, False
    assert harness.call("/health").status_code == 503


def test_live_says_503_once_the_engine_fails_again_and_again(harness: Any) -> None:
    harness.engine.failing = True
    assert harness.call("/live").status_code == 503 and harness.call("/live").json() == {"status": "failing"}


def test_models(harness: Any) -> None:
    harness.app(model_root="/models/x")
    body = harness.call("/v1/models").json()
    assert body["object"] == "list" and [m["id"] for m in body["data"]] == ["m", "alias"]
    card = body["data"][0]
    assert set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
    assert (card["root"], card["max_model_len"]) == ("/models/x", 1024)
    assert harness.call("/v1/models/alias").json()["id"] == "alias"
    assert envelope(harness.call("/v1/models/org/none"), 404)["param"] == "model"


def test_tokenize(harness: Any) -> None:
    body = harness.call("/tokenize", {"prompt": "Hi <|im_end|>", "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) and body["max_model_len"] == 1024
    assert body["token_strs"][-1] == "<|im_end|>"
    assert harness.call("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "Hi <|im_end|>"}
    image = {"type": "image_url", "image_url": "data:image/png;base64,A"}
    chat = harness.call("/tokenize", {"messages": [{"role": "user", "content": [image]}]}).json()
    assert chat["tokens"].count(harness.service.config.image_token) == 6 and chat["token_strs"] is None
    assert envelope(harness.call("/tokenize", {}), 400)["param"] == "prompt"
    assert envelope(harness.call("/detokenize", {"tokens": [5000]}), 400)["param"] == "tokens"


def test_envelopes(harness: Any) -> None:
    assert envelope(harness.call("/nope"), 404)["type"] == "NotFoundError"
    assert (
        envelope(harness.call("/v1/chat/completions"), 405)["message"] == "GET is not allowed on /v1/chat/completions."
    )
    post = {"method": "POST", "path": "/v1/chat/completions"}
    assert (
        "application/json"
        in envelope(harness.call(**post, content="{}", headers={"content-type": "text/plain"}), 400)["message"]
    )
    assert "not valid JSON" in envelope(harness.call(**post, content="{", headers=JSON), 400)["message"]
    assert "JSON object" in envelope(harness.call(**post, content="[]", headers=JSON), 400)["message"]
    assert "JSON object" in envelope(harness.call(**post, content="", headers=JSON), 400)["message"]
    assert envelope(harness.call(**post, content="{}", headers=JSON), 400)["param"] == "messages"
    nested = "[" * 100_000 + "]" * 100_000
    assert envelope(harness.call(**post, content='{"messages":' + nested + "}", headers=JSON), 400)
    harness.service.make_chat_prompt = None
    assert envelope(harness.chat(), 500)["message"] == "Internal server error."


def test_body_limit(harness: Any) -> None:
    harness.app(max_body_bytes=1000)
    assert harness.chat("x").status_code == 200
    assert envelope(harness.chat("x" * 2000), 413)["type"] == "RequestTooLargeError"

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 100

    assert envelope(harness.call("/v1/chat/completions", method="POST", content=chunks(), headers=JSON), 413)


def test_keys(harness: Any) -> None:
    harness.app(api_key=["secret", "other"])
    assert all(harness.call(path).status_code == 200 for path in (*PROBES, "/metrics"))
    for path in ("/v1/models", "/docs", "/openapi.json", "/nope"):
        assert envelope(harness.call(path), 401)["type"] == "AuthenticationError"
    for headers in ({"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"x-api-key": "sécret".encode()}):
        assert harness.call("/v1/models", headers=headers).status_code == 401
    for headers in ({"authorization": "Bearer secret"}, {"authorization": "bearer other"}, {"x-api-key": "other"}):
        assert harness.call("/v1/models", headers=headers).status_code == 200
    assert harness.chat().status_code == 401 and not harness.engine.submitted
    harness.app(api_key=["secret"], metrics_auth=True)
    assert harness.call("/metrics").status_code == 401


def test_metrics_of_tenants_need_a_key_unless_they_are_open(harness: Any, tmp_path: Any) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- name: ann\n  sha256: {hashlib.sha256(b'key').hexdigest()}\n")
    path.chmod(0o600)
    harness.app(api_key_file=str(path))
    assert harness.call("/metrics").status_code == 401 and harness.call("/health").status_code == 200
    assert "ann" in harness.call("/metrics", headers={"x-api-key": "key"}).text
    harness.app(api_key_file=str(path), metrics_open=True)
    assert harness.call("/metrics").status_code == 200


def test_metrics_are_made_a_few_times_a_second() -> None:
    now, cpu, made, slow = [0.0], [0.0], [], False

    async def make() -> bytes:
        made.append(now[0])
        now[0] += 0.05  # waiting for a core is no reason to show an old page
        cpu[0] += 0.1 * slow
        return b"%d" % len(made)

    async def ask(count: int) -> list[bytes]:
        return [await pages.get() for _ in range(count)]

    pages = PageCache(make, lambda: now[0], lambda: cpu[0])
    assert asyncio.run(ask(100))[-1] == b"4" and len(made) == 4
    now[0] = 0.9
    assert asyncio.run(ask(9)) == [b"4"] * 9
    now[0] = 1.0
    assert asyncio.run(ask(9)) == [b"5", b"6", b"7", *[b"8"] * 6]
    slow, now[0] = True, 2.0
    assert asyncio.run(ask(9)) == [b"9"] * 9, "a page that takes 0.1 s of the thread is made once a second"
    now[0] = 2.9
    assert asyncio.run(ask(9)) == [b"9"] * 9
    now[0] = 3.0
    assert asyncio.run(ask(1)) == [b"10"]


def test_cors(harness: Any) -> None:
    ask = {"origin": "http://a", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in harness.call("/health", headers=ask).headers
    harness.app(allowed_origins=["http://a"], api_key=["k"])
    assert harness.call("/v1/chat/completions", method="OPTIONS", headers=ask).status_code == 200
    refused = harness.call("/v1/models", headers={"origin": "http://a"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://a"


def test_request_id(harness: Any) -> None:
    response = harness.call("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]},
                        headers={"x-request-id": "abc-1.2_é/../\u00ff".encode()})  # fmt: skip
    assert response.headers["x-request-id"] == "abc-1.2_.." and response.json()["id"] == "chatcmpl-abc-1.2_.."
    assert len(harness.call("/health").headers["x-request-id"]) == 32
    assert harness.chat(request_id="mine").json()["id"] == "chatcmpl-mine"
    assert len({r.id for r, _ in harness.engine.submitted}) == 2


def test_the_application_is_made_quickly(harness: Any) -> None:
    harness.app()
    begun = time.perf_counter()
    harness.app()
    assert time.perf_counter() - begun < 0.5


def test_metrics(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    harness.engine.stats = EngineStats(running=2, waiting=1, kv_used=25, kv_total=100, prefix_queries=10, prefix_hits=5)
    with caplog.at_level(logging.INFO, "trencadis.server"):
        harness.chat([{"type": "image_url", "image_url": "data:image/png;base64,A"}])
    assert "6 image" in caplog.text and caplog.text.count("request chatcmpl-") == 1
    harness.chat(stop=["wör"])
    harness.chat([{"type": "image_url", "image_url": "data:image/png;base64,bad"}])
    harness.engine.observers[0](EngineStats(step_tokens=[3, 40], buckets=[BucketUse("DECODE", 3, 4, 0.1)]))
    text = harness.call("/metrics").text
    label = 'engine="0",model_name="m"'
    for line in (
        f"vllm:num_requests_running{{{label}}} 2.0",
        f"vllm:num_requests_waiting{{{label}}} 1.0",
        f"vllm:kv_cache_usage_perc{{{label}}} 0.25",
        f"vllm:prefix_cache_hits_total{{{label}}} 5.0",
        f"vllm:iteration_tokens_total_count{{{label}}} 2.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0',
        f"vllm:time_to_first_token_seconds_count{{{label}}} 2.0",
        f"vllm:request_queue_time_seconds_count{{{label}}} 1.0",
        f"vllm:e2e_request_latency_seconds_count{{{label}}} 2.0",
        f"vllm:image_tokens_total{{{label}}} 6.0",
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"} 1.0',
    ):
        assert line in text, line
    assert 'vllm:padding_tokens_total{engine="0",model_name="m",stage="DECODE"} 1.0' in text


def test_stats_line() -> None:
    line = ThroughputLog()
    assert line.format_line(EngineStats()) is None
    text = line.format_line(
        EngineStats(running=1, kv_used=1, kv_total=4, prompt_tokens=50, prefix_queries=4, prefix_hits=1)
    )
    assert text is not None and text.startswith("Avg prompt throughput: ")
    assert "tokens/s, Running: 1 reqs, Waiting: 0 reqs, CPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%" in text
    assert "GPU KV cache usage" in str(
        ThroughputLog().format_line(EngineStats(waiting=1, mm_queries=2, mm_hits=1), "cuda")
    )


def test_preemptions_are_warned_about_with_their_remedy() -> None:
    assert make_preemption_warning(3, 3) is None
    warning = make_preemption_warning(3, 5)
    assert warning is not None and warning.startswith("2 requests") and "--kv-cache-memory-bytes" in warning
