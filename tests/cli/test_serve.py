"""The whole command with an engine and an app that are fakes: start-up order, signals, exit codes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.counting_engine import SLOW
from tests.operations.fake_server import ROOT, FakeServer

SECRETS = ("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRENCADIS_ANY_KEY", "OPENAI_API_KEY",
           "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "DB_PASSWORD")  # fmt: skip


def test_start_up_lines_and_a_clean_end(tmp_path):
    secrets: dict[str, Any] = {name: f"secret-{name}" for name in SECRETS}
    keys = ["--api-key", "very-secret", "other-secret", "--hf-token=very-secret-token", "--max-num-seqs", "7"]
    with FakeServer("some-model", *keys, cwd=tmp_path, **secrets) as server:
        server.wait_for("Uvicorn running on http://127")
        text = server.text
        assert text.count("everybody on this machine could read") == 2
        shown = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert b"secret" not in shown and b"--api-key\0***" in shown and b"--hf-token=***" in shown
        (engine,) = psutil.Process(server.process.pid).children()
        for name in ("cmdline", "environ"):
            assert b"secret" not in Path(f"/proc/{engine.pid}/{name}").read_bytes()
        assert httpx.get(server.url + "/health").status_code == 200
        assert "secret" not in text
        assert "api_key = **** (flag)" in text and "max_num_seqs = 7 (flag)" in text
        assert "KV cache size: 8,192 tokens" in text
        assert "Maximum concurrency for 4,096 tokens per request: 2.00x" in text
        assert "Route: /health, Methods: GET" in text and "Route: /count, Methods: GET" in text
        order = ["listening on", "Route: ", "KV cache size", "Application startup complete.", "Uvicorn running on"]
        places = [text.index(part) for part in order if part != "Route: "]
        assert places == sorted(places) and text.count("Application startup complete.") == 1
        assert httpx.get(server.url + "/health").json() == {"phase": "idle"}
        assert httpx.get(server.url + "/count").text.splitlines()[-1] == "[2] length"
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 0
        assert "Traceback" not in server.text


def test_health_says_the_phase_while_the_engine_loads(tmp_path):
    """However long that takes: the engine loads until it is told to go on."""
    go = tmp_path / "go"
    with FakeServer(f"held:{go}") as server:
        server.wait_for("app built")
        answer = httpx.get(server.url + "/health", timeout=60)
        assert answer.status_code == 503 and answer.json()["phase"] in ("starting", "importing", "loading")
        go.touch()
        server.wait_for("Uvicorn running on")
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200


class Counting:
    """A stream of counted tokens on a thread; ``begun`` once its first line is here."""

    def __init__(self, server, tokens):
        self.lines, self.begun = [], threading.Event()
        self.url = f"{server.url}/count?kind={SLOW}&tokens={tokens}"
        self.thread = threading.Thread(target=self.read)
        self.thread.start()
        assert self.begun.wait(75)

    def read(self):
        try:
            with httpx.stream("GET", self.url, timeout=75) as answer:
                for line in answer.iter_lines():
                    self.lines.append(line)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.lines.append(str(error))

    def last(self):
        self.thread.join()
        return self.lines[-1]


def test_first_signal_drains_second_stops():
    with FakeServer("m") as server:
        server.wait_for("Uvicorn running on")
        stream = Counting(server, 100)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("finishing 1 requests")
        assert httpx.get(server.url + "/health", timeout=60).json() == {"phase": "draining"}
        assert server.end(50) == 0
        assert stream.last() == "[99] length"

    with FakeServer("m", "--shutdown-timeout", "600") as server:
        server.wait_for("Uvicorn running on")
        stream = Counting(server, 100000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("finishing 1 requests")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(75) == 0, "neither the stream nor the ten minutes are waited for"
        stream.last()
        assert "Traceback" not in server.text


def test_a_drain_that_runs_out_of_time_ends_streams_with_an_error_and_others_with_503():
    with FakeServer("m", "--drain-delay", "1.5", "--shutdown-timeout", "1.5") as server:
        server.wait_for("Uvicorn running on")
        got = {}

        def ask(path):
            got[path] = httpx.get(f"{server.url}/{path}", timeout=20)

        def begin(path):
            threads.append(threading.Thread(target=ask, args=(path,)))
            threads[-1].start()

        threads = []
        slow = f"kind={SLOW}&tokens=100000"
        for path in (f"events?{slow}", f"whole?{slow}", "fetch"):
            begin(path)
        end = time.monotonic() + 10
        while httpx.get(server.url + "/inside").text != "3":
            assert time.monotonic() < end
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("taking requests for 1.5 s more")
        assert httpx.get(server.url + "/health").status_code == 503
        assert httpx.get(server.url + "/count?tokens=3").text.splitlines()[-1] == "[2] length"
        server.wait_for("finishing 2 requests")
        assert httpx.get(server.url + "/whole?kind=1&tokens=3").status_code == 503
        assert server.end() == 1, "requests were lost"
        for thread in threads:
            thread.join()
        lines = got[f"events?{slow}"].text.split("\n\n")
        assert lines[0] == "data: 0" and '"code":503' in lines[-3] and lines[-2:] == ["data: [DONE]", ""]
        for path in (f"whole?{slow}", "fetch"):
            assert got[path].status_code == 503 and got[path].json()["error"]["type"] == "ServiceUnavailableError"
        assert "Traceback" not in server.text
        assert "2 requests did not finish in 1.5 s (--shutdown-timeout): they end with an error" in server.text


def test_a_signal_during_start_up_is_a_plain_end():
    with FakeServer("slow") as server:
        server.wait_for("starting the engine")
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0 and "Traceback" not in server.text


def test_a_killed_engine_comes_back():
    with FakeServer("m") as server:
        server.wait_for("Uvicorn running on")
        (engine,) = psutil.Process(server.process.pid).children()
        engine.kill()
        server.wait_for("the engine stopped .exit code -9.; restart in 1 s")
        assert httpx.get(server.url + "/health").json() == {"phase": "restarting"}
        end = time.monotonic() + 10
        while httpx.get(server.url + "/health").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_one_line_and_exit_code_2():
    with FakeServer("missing") as server:
        assert server.end() == 2
        assert server.lines[-1] == "trencadis: There is no such model." and "Traceback" not in server.text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with FakeServer("m", "--port", str(port)) as server:
            assert server.end() == 2
            assert server.lines[-1] == f"trencadis: port {port} on 127.0.0.1 is in use; choose another with --port."


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["/no/such/folder"], "There is no model folder /no/such/folder"),
        (["owner/name"], "There is no folder owner/name here, HF_HUB_OFFLINE is set, and its cache lacks this model."),
    ],
)
def test_models_that_are_not_there(words, line, tmp_path):
    real = ["--app", "trencadis.server.processes.build_app:build_app"]
    with FakeServer(*words, *real, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)) as server:
        assert server.end(20) == 2
        assert line in server.lines[-1] and "Traceback" not in server.text


def test_unix_socket(tmp_path):
    path = tmp_path / "s"
    with FakeServer("m", "--uds", str(path)) as server:
        server.wait_for("Uvicorn running on unix socket")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://x/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0 and not path.exists()


def test_the_module_takes_sub_commands_as_well():
    env = os.environ | {"PYTHONPATH": ROOT}
    run = [sys.executable, "-P", "-m", "trencadis.server"]
    assert subprocess.run([*run, "version"], env=env, capture_output=True, text=True).stdout.strip()
    out = subprocess.run([*run, "serve", "--no-such-flag"], env=env, capture_output=True, text=True)
    assert out.returncode == 2 and "--no-such-flag" in out.stderr
