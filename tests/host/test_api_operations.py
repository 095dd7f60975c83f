"""Several API processes while a server is operated: keys and certificates read again, sleep, drains, deaths."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.host.test_api_live import SHAPES
from tests.host.test_api_processes import (
    ANN,
    BEN,
    DEADLINE,
    ENGINE,
    KEEP_ALIVE,
    LONG,
    PacedStream,
    Several,
    body,
    until,
)
from tests.operations.fake_server import FakeServer
from tests.operations.test_tls import certificate, needs_openssl, put
from tests.traffic.image_chats import data_url
from tests.traffic.server_process import RunningServer, server, words_of
from trencadis.server.tenants.tenant_registry import LOOK_EVERY

pytestmark = pytest.mark.long
COUNT = 3


def keys(file: Path, **tenants: dict[str, Any]) -> None:
    """Writes a key file with a key ``key-NAME`` for each tenant, in one piece."""
    rows = [
        {"name": name, "sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest(), **limits}
        for name, limits in tenants.items()
    ]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"keys": rows}))  # JSON is YAML
    new.chmod(0o600)
    new.replace(file)


@contextlib.contextmanager
def several(folder: Path, *flags: str) -> Iterator[Several]:
    """A server with ``COUNT`` API processes over a scripted engine; it ends well, without a traceback."""
    words = ("--api-server-count", str(COUNT), "--served-model-name", "m", "--shutdown-timeout", "60", *flags)
    with FakeServer(*words, fakes=ENGINE, TMPDIR=str(folder), VLLM_HTTP_TIMEOUT_KEEP_ALIVE=KEEP_ALIVE) as made:
        found = Several(made)
        children = found.front.children(recursive=True)
        yield found
        with contextlib.suppress(psutil.NoSuchProcess):
            children += found.front.children(recursive=True)
        if made.process.poll() is None:
            made.process.send_signal(signal.SIGTERM)
        assert made.end(DEADLINE) == 0, made.text[-3000:]
        _, alive = psutil.wait_procs(children, 5)
        assert not alive and "Traceback" not in made.text, made.text[-3000:]


def status(client: httpx.Client, headers: dict[str, str]) -> int:
    return client.post("/v1/completions", json=body(), headers=headers).status_code


def again(made: Several, index: int) -> None:
    """Kills an API process, and waits until another one has taken its place."""
    before = made.processes()[index]
    os.kill(before, signal.SIGKILL)
    until(lambda: made.processes().get(index, before) != before, "it is started again")


def test_keys_are_read_again_by_all_and_limits_still_hold_over_all(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys(file, ann={}, ben={})
    with several(tmp_path, "--api-key-file", str(file)) as made:
        clients = [made.client(i) for i in range(COUNT)]
        assert {status(client, BEN) for client in clients} == {200}
        stream = PacedStream(made.client(0), LONG, BEN)

        # Ben's key has a bound now, which his open stream uses up; Ann's is gone, and Cid's is new.
        keys(file, ben={"concurrency": 1}, cid={"tokens_per_minute": 200})
        made.front.send_signal(signal.SIGHUP)
        cid = {"authorization": "Bearer key-cid"}
        until(lambda: [status(client, ANN) for client in clients] == [401] * COUNT, "all forget a key")
        assert [status(client, BEN) for client in clients] == [429] * COUNT
        stream.leave()
        until(lambda: status(clients[1], BEN) == 200, "the stream has ended")
        left = [
            int(client.post("/v1/completions", json=body(30), headers=cid).headers["x-ratelimit-remaining-tokens"])
            for client in clients
        ]
        assert left == sorted(left, reverse=True) and left[0] - left[-1] > 40, "one minute's tokens for all"
        assert made.server.text.count(": 2 tenants") == COUNT

        # A file that cannot be used changes nothing, and each says so.
        file.write_text("keys: [{name: x}]")
        made.front.send_signal(signal.SIGHUP)
        until(lambda: made.server.text.count("stay in force") == COUNT, "each process warns")
        assert {status(client, BEN) for client in clients} == {200} and status(clients[0], ANN) == 401

        # A process that is started again knows what the others know; a change is seen without a signal, too.
        keys(file, ann={}, ben={})
        time.sleep(1.5 * LOOK_EVERY)
        until(lambda: {status(client, BEN) for client in clients} == {200}, "each looks at the file")
        again(made, 0)
        assert [status(client, ANN) for client in (made.client(0), *clients[1:])] == [200] * COUNT


@needs_openssl
@pytest.mark.parametrize("how", ["SIGHUP", "--enable-ssl-refresh"])
def test_certificates_are_read_again_by_all(how: str, tmp_path: Path) -> None:
    for name in ("old", "new"):
        certificate(tmp_path, name)
    at = tmp_path / "server"
    put(tmp_path, "old", at)
    flags = ["--ssl-certfile", str(at.with_suffix(".pem")), "--ssl-keyfile", str(at.with_suffix(".key"))]
    with several(tmp_path, *flags, *([how] if how.startswith("--") else [])) as made:
        made.server.wait_for("listening on https://")
        port = made.server.wait_for(r"listening on https://127\.0\.0\.1:(\d+)")[1]
        url = f"https://127.0.0.1:{port}"

        def shown() -> Counter[str]:
            """Which certificate 30 new connections are shown; the system deals them among the processes."""
            found = Counter[str]()
            for _ in range(30):
                for name in ("old", "new"):
                    context = ssl.create_default_context(cafile=str(tmp_path / f"{name}.pem"))
                    with contextlib.suppress(httpx.ConnectError):
                        found[name] += httpx.get(url + "/live", verify=context, trust_env=False).status_code == 200
            return +found

        context = ssl.create_default_context(cafile=str(tmp_path / "old.pem"))
        held = httpx.Client(base_url=url, verify=context, trust_env=False, timeout=DEADLINE)
        assert held.get("/live").status_code == 200 and shown() == {"old": 30}
        put(tmp_path, "new", at)
        if how == "SIGHUP":
            made.front.send_signal(signal.SIGHUP)
        until(lambda: made.server.text.count("read again") == COUNT, "each process reads them")
        assert shown() == {"new": 30}
        again(made, 1)
        assert shown() == {"new": 30}
        held.close()


def test_sleep_and_waking_are_the_servers_and_wait_for_the_requests_of_all(tmp_path: Path) -> None:
    with several(tmp_path, "--enable-sleep-mode", "--max-num-seqs", "4", "--max-num-queued-reqs", "4") as made:
        clients = [made.client(i) for i in range(COUNT)]
        first = clients[0].post("/v1/completions", json=body()).json()["choices"]
        streams = [PacedStream(made.client(i), 150) for i in (1, 2)]
        assert clients[0].post("/sleep").json()["status"] == "sleeping", "it waited for requests of other processes"
        for stream in streams:
            assert stream.end()[-1] == "data: [DONE]"
        until(lambda: [c.get("/is_sleeping").json()["is_sleeping"] for c in clients] == [True] * COUNT, "all know")
        assert not engines(made)
        assert {client.get(path).status_code for client in clients for path in ("/live", "/health", "/ready")} == {200}

        # Requests of all processes wait together, up to the bounds, and wake one engine.
        with ThreadPoolExecutor(24) as pool:
            reported = list(pool.map(lambda i: clients[i % COUNT].post("/v1/completions", json=body()), range(24)))
        counts = Counter(one.status_code for one in reported)
        assert set(counts) <= {200, 429} and counts[200] >= 8, counts
        assert all(one.json()["choices"] == first for one in reported if one.status_code == 200)
        assert len(engines(made)) == 1
        until(lambda: [c.get("/is_sleeping").json()["is_sleeping"] for c in clients] == [False] * COUNT, "all know")

        # What sleeps through one process is woken through another; a request under way may be aborted.
        stream = PacedStream(made.client(1), LONG)
        assert clients[2].post("/sleep?level=2&mode=abort").json()["level"] == 2
        assert stream.end()[-1] == "data: [DONE]" and not stream.error
        assert clients[1].post("/wake_up").json()["status"] == "awake"
        assert clients[0].post("/v1/completions", json=body()).json()["choices"] == first
        text = clients[2].get("/metrics").text
        for operation in ("sleep", "wake"):
            assert made.metric(text, "vllm:sleep_mode_operation_duration_seconds_count", operation=operation) == 2

        # A process that dies while its request waits for the engine takes nothing along.
        assert clients[0].post("/sleep").json()["status"] == "sleeping"
        lost = threading.Thread(target=_ask, args=(clients[0],))
        lost.start()
        time.sleep(0.2)
        os.kill(made.processes()[0], signal.SIGKILL)
        lost.join(DEADLINE)
        assert clients[1].post("/v1/completions", json=body()).json()["choices"] == first
        until(lambda: clients[1].get("/load").json() == {"server_load": 0}, "nothing is held")


def _ask(client: httpx.Client) -> None:
    with contextlib.suppress(httpx.HTTPError):
        client.post("/v1/completions", json=body())


def engines(made: Several) -> list[int]:
    """The engines' processes."""
    return [child.pid for child in made.front.children() if any("core.process" in word for word in words_of(child))]


def test_a_server_without_requests_falls_asleep_and_any_process_wakes_it(tmp_path: Path) -> None:
    with several(tmp_path, "--sleep-after", "2") as made:
        clients = [made.client(i) for i in range(COUNT)]
        first = clients[0].post("/v1/completions", json=body()).json()["choices"]
        stream = PacedStream(made.client(2), 250)  # five seconds
        time.sleep(3)
        assert engines(made), "a request of any process keeps it awake"
        assert stream.end()[-1] == "data: [DONE]"
        for client in clients:
            until(lambda: not engines(made), "it falls asleep")
            assert client.get("/health").status_code == 200 and not engines(made), "probes wake nobody"
            assert client.post("/v1/completions", json=body()).json()["choices"] == first


def test_a_drain_takes_requests_of_all_for_its_delay_and_loses_none(tmp_path: Path) -> None:
    """Connections come and go while the server is told to leave; who was taken is answered."""
    with several(tmp_path, "--drain-delay", "10") as made:
        probes = [made.client(i) for i in range(COUNT)]
        streams = [PacedStream(made.client(i), 700) for i in range(COUNT)]  # fourteen seconds
        stop, found = threading.Event(), list[int]()

        def keep_asking(_: int) -> None:
            while not stop.is_set():
                found.append(httpx.post(made.server.url + "/v1/completions", json=body(), timeout=DEADLINE).status_code)

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(keep_asking, i) for i in range(8)]
            time.sleep(0.5)
            made.front.send_signal(signal.SIGTERM)
            until(lambda: [c.get("/health").status_code for c in probes] == [503] * COUNT, "probes fail at once")
            before = len(found)
            until(lambda: len(found) >= before + 16, "requests are still taken")
            stop.set()
            for one in asking:
                one.result()
        print(f"{len(found)} requests around the signal, {len(found) - before} of them behind it: {Counter(found)}")
        assert set(found) == {200}
        for stream in streams:
            assert stream.end()[-1] == "data: [DONE]" and not stream.error


def test_processes_die_under_streams_of_all_and_lose_their_own_alone(tmp_path: Path) -> None:
    with several(tmp_path, "--max-num-seqs", "16") as made:
        for index in (0, 1, 2):
            streams = {i: [PacedStream(made.client(i), LONG) for _ in range(3)] for i in range(COUNT)}
            os.kill(made.processes()[index], signal.SIGKILL)
            for stream in streams.pop(index):
                assert "data: [DONE]" not in stream.end() and stream.error
            for stream in (one for some in streams.values() for one in some):
                seen = len(stream.lines)
                until(lambda stream=stream, seen=seen: len(stream.lines) > seen + 5, "it goes on")
                assert not stream.error
                stream.leave()
            nothing_left(made, (index + 1) % COUNT)
        with contextlib.closing(made.client(0)) as client:
            assert made.metric(client.get("/metrics").text, "vllm:engine_restarts_total") == 0


def nothing_left(made: Several, index: int) -> None:
    """All API processes are there again, and neither they nor the engine hold anything for one that died."""
    until(lambda: len(made.processes()) == COUNT, "it is started again")
    with contextlib.closing(made.client(index)) as client:
        until(lambda: client.get("/load").json() == {"server_load": 0}, "nothing is held")
        until(lambda: client.get("/stats").json()["running"] == 0, "the engine runs nothing for the dead")


@pytest.mark.parametrize("state", ["stuck", "killed", "starting"])
def test_a_server_ends_whatever_state_its_processes_are_in(state: str, tmp_path: Path) -> None:
    with several(tmp_path) as made:
        stream, one = PacedStream(made.client(1), 100), made.processes()[0]
        os.kill(one, signal.SIGSTOP if state == "stuck" else signal.SIGKILL)
        if state == "starting":
            until(lambda: made.processes().get(0, one) != one, "it is started again")
        begun = time.monotonic()
        made.front.send_signal(signal.SIGTERM)
        assert stream.end()[-1] == "data: [DONE]" and not stream.error
        assert made.server.end(DEADLINE) == 0, made.server.text[-3000:]
        print(f"{state}: {time.monotonic() - begun:.1f} s")


FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "2048", "--threads", "1",
    "--kv-cache-memory-bytes", "128MiB", "--mm-processor-kwargs", '{"max_pixels": 200704}', "--enable-sleep-mode",
    "--api-server-count", "2",
)  # fmt: skip


def test_a_real_engine_sleeps_under_two_processes_and_images_keep_their_names(tmp_path: Path) -> None:
    url = data_url(Image.open(SHAPES).convert("RGB"))

    def say(running: RunningServer, part: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is in the picture?"}]}]
        requested = {"messages": messages, "max_tokens": 16, "temperature": 0}
        # A connection of its own, so that it comes to any process.
        answer = httpx.post(running.url + "/v1/chat/completions", json=requested, timeout=240, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    with server(tmp_path, *FLAGS, seconds=240) as running:
        first = say(running, {"type": "image_url", "image_url": {"url": url}, "uuid": "shapes"})
        named = {"type": "image_url", "image_url": None, "uuid": "shapes"}
        for _ in range(3):
            assert running.http.post("/sleep").json()["status"] == "sleeping"
            assert not running.engine_pids()
            with ThreadPoolExecutor(6) as pool:
                reported = list(pool.map(lambda _: say(running, named), range(6)))
            assert reported == [first] * 6, "prepared images outlive the engine, and cross from one process to another"
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
        assert "Traceback" not in running.text()
