"""Tenants over HTTP: who gets in, what limits say, what reaches the engine, what metrics and errors show."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint

KEY = {"authorization": "Bearer key-a"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("tenants"))


def key_file(folder: Path, more: str = "") -> str:
    path = folder / "keys.yaml"
    digest = hashlib.sha256(b"key-a").hexdigest()
    path.write_text(f"keys:\n- name: ann\n  sha256: {digest}\n{more}")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def harness(checkpoint: Path) -> ScriptedApp:
    return scripted_app(checkpoint)


def test_a_tenant_and_its_weight_reach_the_engine(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path, "  weight: 3\n"), api_key=["plain"])
    assert harness.call("/v1/chat/completions", CHAT, headers=KEY).status_code == 200
    assert harness.call("/v1/chat/completions", CHAT, headers={"x-api-key": "plain"}).status_code == 200
    (mine, _), (other, _) = harness.engine.submitted
    assert (mine.tenant, mine.weight) == ("ann", 3.0) and (other.tenant, other.weight) == ("", 1.0)


def test_limits_answer_429_with_what_is_left(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path, "  requests_per_minute: 2\n  tokens_per_minute: 600\n"))
    first = harness.call("/v1/chat/completions", CHAT, headers=KEY)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    second = harness.call("/v1/chat/completions", CHAT, headers=KEY)
    # What the first answer had is spent too.
    assert int(second.headers["x-ratelimit-remaining-tokens"]) < int(first.headers["x-ratelimit-remaining-tokens"])
    third = harness.call("/v1/chat/completions", CHAT, headers=KEY)
    assert third.status_code == 429 and 1 <= int(third.headers["retry-after"]) <= 30
    assert third.json()["error"]["message"].startswith("The limit requests_per_minute of this key is reached")
    usage = first.json()["usage"]
    spent = harness.made.state.trencadis.tenants.accounts["ann"].used["tokens_per_minute"]  # type: ignore[union-attr]
    assert spent == 2 * usage["total_tokens"]


def test_what_a_request_held_is_given_back(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path, "  concurrency: 2\n"))
    assert harness.call("/v1/chat/completions", CHAT | {"n": 3, "temperature": 1}, headers=KEY).status_code == 429
    for _ in range(3):
        assert harness.call("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1}, headers=KEY).status_code == 200
    bad = CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "bad"}}]}]}
    for _ in range(3):
        assert harness.call("/v1/chat/completions", bad, headers=KEY).status_code == 400
    assert harness.made.state.trencadis.tenants.accounts["ann"].inside == 0  # type: ignore[union-attr]


def test_priorities_outside_the_range_are_forbidden(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path, "  priority: [0, 5]\n"), priorities=True)
    assert harness.call("/v1/chat/completions", CHAT | {"priority": 5}, headers=KEY).status_code == 200
    refused = harness.call("/v1/chat/completions", CHAT | {"priority": -1}, headers=KEY)
    assert refused.status_code == 403 and refused.json()["error"]["param"] == "priority"


def test_a_hundred_attacks_on_the_key_stay_outside(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path), api_key=["other-key"], disable_page=True)
    digest = hashlib.sha256(b"key-a").hexdigest()
    texts = ["", " ", "key-", "key-a ".strip() + "a", "KEY-A", "key-a\u00e9", "ann", digest, "a" * 5000, "*", "null"]
    texts += ["other-ke", "key-a,other-key", "key-a;", "%6bey-a", "Bearer key-a"]
    schemes = ["Bearer {}", "bearer  {} x", "Basic {}", "{}", "Token {}"]
    headers = [
        {"authorization": s.format(t).encode("latin-1", "replace")} for s, t in itertools.product(schemes, texts)
    ]
    headers += [{"x-api-key": t.encode("latin-1", "replace")} for t in texts]
    headers = [h for h in headers if h != {"authorization": b"Bearer key-a"}]
    assert len(headers) >= 90
    for header in headers:
        reported = harness.call("/v1/models", headers=header)  # type: ignore[arg-type]
        assert reported.status_code == 401, header
        assert reported.json()["error"]["message"] == "The API key is missing or wrong."
    for path in ("/v1//models", "/V1/models", "/v1/models/", "/health/../v1/models", "/v1/models?x=/health"):
        assert harness.call(path).status_code == 401, path
    assert harness.call("/v1/models", headers=KEY).status_code == 200


def test_metrics_name_tenants_and_never_keys(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path, "  concurrency: 1\n"))
    harness.call("/v1/chat/completions", CHAT, headers=KEY)
    harness.call("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1}, headers=KEY)
    text = harness.call("/metrics", headers=KEY).text
    assert 'vllm:tenant_requests_total{tenant="ann"} 1.0' in text
    assert 'vllm:tenant_rejected_total{limit="concurrency",tenant="ann"} 1.0' in text
    assert "key-a" not in text and hashlib.sha256(b"key-a").hexdigest() not in text
