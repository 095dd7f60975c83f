"""Attacks on keys over a socket: paths, headers, methods, rotated and expired keys; and where keys must not stand."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.scripted_app import ScriptedApp, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from tests.operations.fake_server import ENGINE, FakeServer
from tests.operations.otlp_collector import Collector
from tests.traffic.live_app import live

KEY, OTHER = "key-a", "other-key"
GOOD = f"Authorization: Bearer {KEY}"
WRONG = ["", "x-api-key: key-", "x-api-key: key-aa", "Authorization: Bearer", "Authorization: Basic key-a",
         "Authorization: bearer key-a x", "Authorization: Bearer\tkey-b", "x-api-key: k\u0435y-a",
         "Cookie: authorization=Bearer key-a", "X-Api-Key: key-a,key-a", "Authorization: Bearer other-ke"]  # fmt: skip
PATHS = ["/v1/models", "//v1/models", "/v1//models", "/v1/models/", "/v1%2fmodels", "/%76%31/models", "/v1/./models",
         "/health/../v1/models", "/health%2f..%2fv1/models", "/health;/v1/models", "/v1/models?/health",
         "/v1/models#/health", "/v1/models%00/health", "/V1/MODELS", "/api/v1/models", "/api/api/v1/models",
         "http://x/v1/models", "/health/v1/models", "/metrics/../v1/models", "/tokenize", "/stats", "/buckets",
         "/v1/models/m", "/openapi.json"]  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "OPTIONS", "get", "GARBAGE"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_checkpoint(tmp_path_factory.mktemp("attacks"))


@pytest.fixture
def harness(checkpoint: Path) -> ScriptedApp:
    return scripted_app(checkpoint)


def key_file(folder: Path, **keys: str) -> str:
    """A file with a tenant for each of ``keys``, whose value is what its entry has beside the digest."""
    path, lines = folder / "keys.yaml", ["keys:"]
    for name, more in keys.items():
        digest = hashlib.sha256(name.replace("_", "-").encode()).hexdigest()
        lines += [f"- name: {name}", f"  sha256: {digest}", *([f"  {more}"] if more else [])]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return str(path)


def status(port: int, method: str, target: str, *headers: str) -> int:
    """The status of a request that is written byte by byte, as no client would."""
    body = b'{"prompt": "Hi"}' if method == "POST" else b""
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *(h for h in headers if h)]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as s:
        s.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        answer = s.recv(1 << 16)
        while b"\r\n\r\n" not in answer and (more := s.recv(1 << 16)):
            answer += more
    assert b'"object":"list"' not in answer and b'"tokens"' not in answer, answer
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize("root", ["", "/api"])
def test_no_path_no_header_and_no_method_gets_in(harness: ScriptedApp, tmp_path: Path, root: str) -> None:
    harness.app(api_key_file=key_file(tmp_path, key_a=""), api_key=[OTHER], root_path=root, disable_page=True)
    with live(harness, root_path=root) as url:
        port, tried = int(url.rpartition(":")[2]), 0
        got: list[tuple[str, str, str, int]] = []
        asks = [("GET", path, header) for path in PATHS for header in WRONG[:3]]
        asks += [("GET", "/v1/models", header) for header in WRONG]
        asks += [(method, "/v1/models", "") for method in METHODS] + [("POST", "/tokenize", h) for h in WRONG]
        for method, path, header in asks:
            tried += 1
            found = status(port, method, path, header)
            # OPTIONS tells nothing but what a path allows.
            if 200 <= found < 400 and not (method == "OPTIONS" and found == 200):
                got.append((method, path, header, found))
        assert tried >= 100 and not got
        assert status(port, "GET", "/health") == 200
        assert httpx.get(url + "/v1/models", headers={"x-api-key": OTHER}, trust_env=False).status_code == 200


def test_both_headers_and_doubled_ones(harness: ScriptedApp, tmp_path: Path) -> None:
    """One right key is enough, wherever it stands; two wrong ones are not."""
    harness.app(api_key_file=key_file(tmp_path, key_a=""))
    with live(harness) as url:
        port = int(url.rpartition(":")[2])
        wrong = "Authorization: Bearer key-b"
        assert status(port, "GET", "/v1/models", wrong, "x-api-key: key-b") == 401
        assert status(port, "GET", "/v1/models", wrong, "Authorization: Bearer key-c") == 401
        assert httpx.get(
            url + "/v1/models", headers={"authorization": "Bearer key-b", "x-api-key": KEY}, trust_env=False
        ).status_code == 200  # fmt: skip


def test_rotated_and_expired_keys_are_outside(harness: ScriptedApp, tmp_path: Path) -> None:
    harness.app(api_key_file=key_file(tmp_path, key_a="", old="expires: 2020-01-01"))
    assert harness.made is not None
    tenants = harness.made.state.trencadis.tenants

    def of(key: str) -> int:
        return harness.call("/v1/models", headers={"x-api-key": key}).status_code

    assert (of("key-a"), of("old")) == (200, 401)
    key_file(tmp_path, key_b="")
    tenants.reload()
    assert (of("key-a"), of("key-b")) == (401, 200)
    (tmp_path / "keys.yaml").write_text("keys: [")
    tenants.reload()
    assert (of("key-a"), of("key-b")) == (401, 200), "a broken file lets nobody in, and keeps nobody out"


SECRETS = {"VLLM_API_KEY": "sk-plain-1f2e3d", "HF_TOKEN": "hf_token-9a8b7c", "OPENAI_API_KEY": "sk-openai-55aa"}


def test_keys_stand_in_no_log_no_child_no_metric_and_no_trace(tmp_path: Path) -> None:
    """A whole server with a key file, plain keys and a hub token, which logs all that it can, as JSON."""
    words = ["--api-key-file", key_file(tmp_path, named_key="requests_per_minute: 1"), "--log-level", "DEBUG"]
    words += ["--log-format", "json", "--enable-log-requests", "--enable-log-outputs", "--uvicorn-log-level", "trace"]
    collector = None
    if importlib.util.find_spec("opentelemetry.exporter") is not None:
        collector = Collector()
        words += ["--otlp-traces-endpoint", collector.url]
    keys = ["named-key", *SECRETS.values(), "wrong-key-77"]
    with FakeServer(*words, cwd=tmp_path, fakes=tuple(ENGINE), **SECRETS) as server:
        server.wait_for("Uvicorn running on")
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            for key in keys:
                for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
                    http.get(f"/v1/models?api_key={key}", headers=headers)
                    http.post(f"/v1/completions?key={key}", json={"prompt": "Hi", "max_tokens": 2}, headers=headers)
            shown = http.get("/metrics", headers={"x-api-key": "named-key"}).text
        assert 'tenant="named_key"' in shown
        running = psutil.Process(server.process.pid)
        shown += " ".join(running.cmdline())
        for child in running.children(recursive=True):
            for name in ("cmdline", "environ"):
                shown += Path(f"/proc/{child.pid}/{name}").read_bytes().decode(errors="replace")
        server.process.terminate()
        assert server.end() == 0
    if collector is not None:
        assert collector.bodies
        shown += b"".join(collector.bodies).decode(errors="replace")
        collector.close()
    for key in keys:
        for text in (key, hashlib.sha256(key.encode()).hexdigest()):
            assert text not in server.text, next(line for line in server.lines if text in line)
            assert text not in shown, key
    lines = [json.loads(line) for line in server.lines]
    closing = [line for line in lines if line.get("event") == "closing"]
    assert {line["status"] for line in closing} == {200, 429} and closing[0]["tenant"] == "named_key"
    assert {line["logger"] for line in lines} >= {"server", "uvicorn"}
