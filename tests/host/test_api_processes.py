"""``serve --api-server-count 2`` over a scripted engine: one address, one set of limits, one /metrics."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.host.paced_engine import PACED
from tests.operations.fake_server import FakeServer
from tests.traffic.server_process import words_of
from trencadis.server.routes.health_and_metrics import CACHE_SECONDS

ENGINE = ("--engine", "tests.host.paced_engine:PacedEngine.create")
DEADLINE = 180.0
KEEP_ALIVE = "600"
"""A client whose idle connection was closed would open another one, to any of the processes."""
API = "server.processes.api_worker_process_main"
ANN, BEN = {"authorization": "Bearer key-ann"}, {"authorization": "Bearer key-ben"}
LONG = 3000
"""Tokens of a stream that a test ends."""
BOUND = 4
"""Requests inside: two that run and two that wait."""


class Several:
    """A server with two API processes, and a client whose connection each of them has."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        server.wait_for("Uvicorn running on", DEADLINE)
        self.front = psutil.Process(server.process.pid)
        self.keys = Path()

    def processes(self) -> dict[int, int]:
        """Process ids by index."""
        found: dict[int, int] = {}
        for child in self.front.children():
            words = words_of(child)
            if any(word.endswith(API) for word in words):
                found[int(words[-1])] = child.pid
        return found

    def client(self, index: int, **headers: str) -> httpx.Client:
        """A client with an open connection to that process; the system deals new ones by chance."""
        end, process = time.monotonic() + DEADLINE, psutil.Process(self.processes()[index])
        while time.monotonic() < end:
            made = httpx.Client(base_url=self.server.url, timeout=DEADLINE, headers={**ANN, **headers}, trust_env=False)
            answer = made.get("/live")
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            if any(c.raddr and c.raddr.port == port for c in process.net_connections()):
                return made
            made.close()
        raise AssertionError(f"no connection came to API process {index}")

    def read_metrics(self, client: httpx.Client) -> str:
        """A page made after this call began: one that took long to make is sent again for ``CACHE_SECONDS``."""
        time.sleep(CACHE_SECONDS)
        return client.get("/metrics").text

    def metric(self, text: str, name: str, **labels: str) -> float:
        """The value of a sample that has these labels."""
        for line in text.splitlines():
            if re.match(rf"{re.escape(name)}[{{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("several")
    keys = [
        {"name": name, "sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest(), **limits}
        for name, limits in (("ann", {}), ("ben", {"concurrency": 1, "tokens_per_minute": 400}))
    ]
    file = folder / "keys.yaml"
    file.write_text(json.dumps({"keys": keys}))  # JSON is YAML
    file.chmod(0o600)
    flags = ("--api-server-count", "2", "--max-num-seqs", "2", "--max-num-queued-reqs", "2", "--api-key-file",
             str(file), "--served-model-name", "m", "--shutdown-timeout", "30",
             "--scheduling-policy", "fair")  # fmt: skip
    with FakeServer(*flags, fakes=ENGINE, TMPDIR=str(folder), VLLM_HTTP_TIMEOUT_KEEP_ALIVE=KEEP_ALIVE) as server:
        made = Several(server)
        made.keys = file
        yield made


def body(tokens: int = 3, kind: int = 1, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": [kind, 5, 6], "max_tokens": tokens, "ignore_eos": True, **more}


class PacedStream:
    """A stream on a thread; ``begun`` once its first event is here."""

    def __init__(self, client: httpx.Client, tokens: int, headers: dict[str, str] | None = None) -> None:
        self.client, self.body, self.headers = client, body(tokens, PACED, stream=True), headers or {}
        self.lines: list[str] = []
        self.error = ""
        self.begun, self.stop = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        assert self.begun.wait(DEADLINE), self.error

    def _read(self) -> None:
        try:
            with self.client.stream("POST", "/v1/completions", json=self.body, headers=self.headers) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.begun.set()
                    if self.stop.is_set():
                        return
        except httpx.HTTPError as error:
            self.error = type(error).__name__
            self.begun.set()

    def leave(self) -> None:
        """Disconnects."""
        self.stop.set()
        self.end()

    def end(self) -> list[str]:
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        return self.lines


def until(what: Any, message: str) -> None:
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, message
        time.sleep(0.02)


def test_two_processes_answer_alike_and_either_tells_the_figures_of_both(several: Several) -> None:
    one, two = several.client(0), several.client(1)
    answers = [client.post("/v1/completions", json=body()).json() for client in (one, two, two)]
    assert {a["choices"][0]["text"] for a in answers} == {answers[0]["choices"][0]["text"]}
    assert {a["usage"]["completion_tokens"] for a in answers} == {3}
    shown = [client.get("/metrics").text for client in (one, two)]
    for text in shown:
        assert several.metric(text, "vllm:request_success_total", finished_reason="length") == 3
        assert several.metric(text, "vllm:generation_tokens_total") == 9, "the engine's own counter, once"
        assert several.metric(text, "vllm:request_generation_tokens_sum") == 9
        assert several.metric(text, "http_requests_total", handler="/v1/completions") == 3
        assert several.metric(text, "vllm:iteration_tokens_total_count") == 0  # this engine tells of no step's tokens
        assert several.metric(text, "vllm:admission_bound", unit="requests") == BOUND
        for role in ("front", "api-0", "api-1", "engine"):
            assert several.metric(text, "vllm:server_processes", role=role) == 1
        assert len(re.findall(r"^vllm:num_requests_running\{", text, re.M)) == 1
        families = re.findall(r"^# TYPE (\S+)", text, re.M)
        assert len(families) == len(set(families))
    # the front tells each process the engine's counters a few times a second
    until(lambda: {c.get("/stats").json()["generation_tokens"] for c in (one, two)} == {9}, "counters of one process")
    assert one.get("/stats").json() == two.get("/stats").json()
    assert one.get("/buckets").json()["device"] == two.get("/buckets").json()["device"] == "fake"
    assert {c.get("/health").status_code for c in (one, two)} == {200}


def test_bounds_and_a_tenants_limits_hold_over_both(several: Several) -> None:
    clients = [several.client(0), several.client(1)]
    streams = [PacedStream(several.client(i % 2), LONG) for i in range(BOUND)]
    for client in clients:
        assert client.get("/load").json() == {"server_load": BOUND}
        refused = client.post("/v1/completions", json=body())
        assert refused.status_code == 429 and "max_num_queued_reqs" in refused.json()["error"]["message"]
    for stream in streams:
        stream.leave()
    until(lambda: clients[0].get("/load").json() == {"server_load": 0}, "tickets come back")
    text = several.read_metrics(clients[1])
    assert several.metric(text, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2

    stream = PacedStream(several.client(0), LONG, BEN)
    refused = clients[1].post("/v1/completions", json=body(), headers=BEN)
    assert refused.status_code == 429 and "concurrency" in refused.json()["error"]["message"]
    stream.leave()
    until(lambda: clients[0].get("/load").json() == {"server_load": 0}, "tickets come back")
    left = []
    for i in range(4):
        answer = clients[i % 2].post("/v1/completions", json=body(30), headers=BEN)
        assert answer.status_code == 200
        left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
    assert left == sorted(left, reverse=True) and left[0] - left[3] > 60, "both spend the same minute's tokens"
    text = several.read_metrics(clients[0])
    assert several.metric(text, "vllm:tenant_requests_total", tenant="ben") == 5
    assert several.metric(text, "vllm:tenant_rejected_total", tenant="ben", limit="concurrency") == 1


def test_a_hangup_has_both_read_the_keys_again(several: Several) -> None:
    """tests/host/test_api_operations.py has limits, broken files, and what a process knows that is started again."""
    clients, before = [several.client(0), several.client(1)], several.keys.read_text()
    cid = {"name": "cid", "sha256": hashlib.sha256(b"key-cid").hexdigest()}
    headers = {"authorization": "Bearer key-cid"}

    def read_log() -> list[int]:
        return [client.post("/v1/completions", json=body(), headers=headers).status_code for client in clients]

    several.keys.write_text(json.dumps({"keys": [*json.loads(before)["keys"], cid]}))
    several.front.send_signal(signal.SIGHUP)
    until(lambda: read_log() == [200, 200], "both know a new key")
    several.keys.write_text(before)
    several.front.send_signal(signal.SIGHUP)
    until(lambda: read_log() == [401, 401], "both forget it")


def test_a_killed_process_takes_its_own_requests_along_and_is_started_again(several: Several) -> None:
    killed, other = several.client(0), several.client(1)
    before = several.metric(several.read_metrics(other), "vllm:request_success_total", finished_reason="length")
    second = several.client(0)
    kept = PacedStream(several.client(1), 200)
    lost = [PacedStream(killed, LONG), PacedStream(second, LONG)]
    until(lambda: other.get("/stats").json()["running"] == 3, "three run")
    os.kill(several.processes()[0], signal.SIGKILL)
    for stream in lost:
        stream.end()
        assert stream.error and "data: [DONE]" not in stream.lines
    until(lambda: other.get("/stats").json()["running"] == 1, "the engine goes on with requests of a dead process")
    assert other.get("/load").json() == {"server_load": 1}, "what it held is free again"
    assert kept.end()[-1] == "data: [DONE]" and len(kept.lines) >= 200, "the other one's streams do not notice"
    several.server.wait_for(r"API process 0 ended \(exit code -9\); restart in")
    until(lambda: 0 in several.processes(), "another one is started")
    again = several.client(0)
    assert again.post("/v1/completions", json=body()).status_code == 200
    text = several.read_metrics(again)
    assert several.metric(text, "vllm:request_success_total", finished_reason="length") == before + 2
    assert several.metric(text, "vllm:admission_inside", unit="requests") == 0


def test_a_signal_lets_both_finish_and_leaves_nothing_behind(several: Several) -> None:
    shared = set(os.listdir("/dev/shm"))
    children = several.front.children(recursive=True)
    assert sum(API in " ".join(words_of(child)) for child in children) == 2
    other, clients = several.client(1), [several.client(i) for i in range(2)]
    streams = [PacedStream(client, 150) for client in clients]
    several.server.process.send_signal(signal.SIGTERM)
    several.server.wait_for("finishing 2 requests")
    until(lambda: other.get("/health").status_code == 503, "probes fail at once")
    assert other.post("/v1/completions", json=body()).status_code == 503
    for stream in streams:
        assert stream.end()[-1] == "data: [DONE]" and not stream.error
    assert several.server.end(DEADLINE) == 0
    _, alive = psutil.wait_procs(children, 5)
    assert not alive and set(os.listdir("/dev/shm")) <= shared
    assert "Traceback" not in several.server.text, several.server.text
    assert not [p for p in Path(os.environ.get("TMPDIR", "/tmp")).glob("*trencadis-api*")]
