"""Signals in every state of a server: it ends in time, with the documented code, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.counting_engine import HELD, SLOW
from tests.operations.fake_server import ENGINE, FakeServer
from trencadis.server.tenants.fair_queue import MIN_ADMITTED

STATES = ("idle", "streaming", "warm-up", "download", "dead engine")
DEADLINE = 75.0
"""Seconds: five times what a state may take, which is 15 s (5 s of them for last answers)."""


@contextlib.contextmanager
def send_request(server: FakeServer, path: str) -> Iterator[list[int]]:
    """A request on a thread; the status that it got, once it has one."""
    got: list[int] = []

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            got.append(httpx.get(f"{server.url}/{path}", timeout=DEADLINE).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    end = time.monotonic() + DEADLINE
    while httpx.get(server.url + "/inside", timeout=DEADLINE).text != "1":
        assert time.monotonic() < end
        time.sleep(0.02)
    yield got
    thread.join()


def shared() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "trencadis" in name or name.startswith(("psm_", "torch_"))}


def ends(state: str, signals: int, folder: Path, *flags: str) -> tuple[int, float]:
    """The exit code of a server with ``flags`` that gets ``signals`` in ``state``, and the seconds until it ended."""
    before = shared()
    model = f"{HELD}{folder}/never" if state == "warm-up" else "m"
    seconds = "600" if signals == 2 else "2"
    with FakeServer(model, "--shutdown-timeout", seconds, *flags, TMPDIR=str(folder)) as server:
        server.wait_for("app built" if state == "warm-up" else "Uvicorn running on")
        running = psutil.Process(server.process.pid)
        children = running.children(recursive=True)
        with contextlib.ExitStack() as stack:
            got: list[int] = []
            if state == "streaming":
                got = stack.enter_context(send_request(server, f"whole?kind={SLOW}&tokens=100000"))
            if state == "download":
                got = stack.enter_context(send_request(server, "fetch"))
            if state == "dead engine":
                children[0].kill()
                server.wait_for("restart in 1 s")
            begun = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                time.sleep(0.2)
                with contextlib.suppress(ProcessLookupError):
                    server.process.send_signal(signal.SIGTERM)
            code, took = server.end(DEADLINE), time.monotonic() - begun
        if state in ("streaming", "download"):
            assert got == [503], "a request that is cut is told so"
        assert "Traceback" not in server.text, server.text
        _, alive = psutil.wait_procs(children, 5)
        assert not alive and not os.listdir(folder) and shared() <= before
    return code, took


@pytest.mark.parametrize(("state", "signals", "code"), [("dead engine", 2, 0)])
def test_a_server_that_does_not_serve_ends_too(state: str, signals: int, code: int, tmp_path: Path) -> None:
    """One cell of the matrix; tests/cli/test_serve.py has those of a server that serves."""
    assert ends(state, signals, tmp_path)[0] == code


@pytest.mark.long
@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("state", STATES)
def test_the_matrix_of_states_and_signals(state: str, signals: int, processes: str, tmp_path: Path) -> None:
    code, seconds = ends(state, signals, tmp_path, "--api-server-count", processes)
    print(f"{state}, {signals} signal(s), {processes} API process(es): exit code {code} after {seconds:.1f} s")
    # One signal gives a stream two seconds here; then it is lost, which the code says.
    assert code == (1 if (state, signals) == ("streaming", 1) else 0)


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "code"), [(60, 0), (0, 1)])
def test_requests_that_wait_for_their_turn_have_it_before_the_end(tmp_path: Path, seconds: int, code: int) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": "a", "sha256": hashlib.sha256(b"k").hexdigest()}]}))
    keys.chmod(0o600)
    words = ("--api-key-file", str(keys), "--scheduling-policy", "fair", "--max-num-seqs", "2")
    with FakeServer(*words, "--shutdown-timeout", str(seconds), fakes=(*ENGINE,), cwd=tmp_path) as server:
        server.wait_for("Uvicorn running on")
        body = {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True}
        headers = {"x-api-key": "k"}
        asks = httpx.Client(base_url=server.url, trust_env=False, timeout=DEADLINE, headers=headers)
        with asks as http, ThreadPoolExecutor(40) as pool:
            reported = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(40)]
            end = time.monotonic() + DEADLINE
            while (waiting := http.get("/stats").json()["waiting_for_turn"]) < 40 - MIN_ADMITTED:
                assert time.monotonic() < end, waiting
            server.process.send_signal(signal.SIGTERM)
            statuses = Counter(one.result().status_code for one in reported)
        assert server.end(DEADLINE) == code, server.text[-3000:]
        print(f"{waiting} waited for their turn: {dict(statuses)}")
        assert (statuses == {200: 40}) if seconds else (statuses[503] > 0 and set(statuses) <= {200, 503})
        assert "Traceback" not in server.text, server.text[-3000:]


@pytest.mark.long
def test_a_balancer_that_looks_every_two_seconds_loses_no_request(tmp_path: Path) -> None:
    """Two servers behind a balancer that learns of a failing probe two seconds late; one of them is told to leave."""
    with FakeServer("m", "--drain-delay", "4", "--shutdown-timeout", "20") as one, FakeServer("m") as other:
        for server in (one, other):
            server.wait_for("Uvicorn running on")
        urls, good = [one.url, other.url], {one.url, other.url}
        stop = threading.Event()
        lost: list[int | str] = []

        def watch() -> None:
            while not stop.wait(2.0):
                for url in urls:
                    with contextlib.suppress(httpx.HTTPError):
                        if httpx.get(url + "/health", timeout=20).status_code == 200:
                            continue
                    good.discard(url)

        def ask(number: int) -> None:
            usable = sorted(good)
            try:
                answer = httpx.get(f"{usable[number % len(usable)]}/count?tokens=3", timeout=60)
                if answer.status_code != 200 or not answer.text.endswith("[2] length\n"):
                    lost.append(answer.status_code)
            except httpx.HTTPError as error:
                lost.append(repr(error))

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(8) as pool:
            first = [pool.submit(ask, i) for i in range(700)]
            for one_done in first[:300]:
                one_done.result()
            one.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 600
            rest = [pool.submit(ask, i) for i in range(700, 2000)]
            for done in (*first, *rest):
                done.result(timeout=max(1.0, end - time.monotonic()))
        assert one.end() == 0
        stop.set()
        watcher.join()
        print(f"{len(lost)} of 2,000 requests were lost")
        assert not lost and good == {other.url}
