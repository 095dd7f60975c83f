"""Several API processes with real engines of the demo model: the same tokens, media by uuid, grammars, two replicas."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fleet.test_live import make_image
from tests.traffic.server_process import ROOT, RunningServer, server, words_of

pytestmark = pytest.mark.long

FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "--max-model-len", "2048",
    "--kv-cache-memory-bytes", "256MiB", "--mm-processor-kwargs", '{"max_pixels": 200704}', "--threads", "2",
)  # fmt: skip
SHAPES = Path(__file__).resolve().parents[2] / "assets" / "demo_picture.png"


def ask(number: int) -> dict[str, Any]:
    """Texts, choices, images and forms, by number."""
    content: Any = f"Tell me {number} things about a boat."
    if number % 3 == 0:
        content = [
            {"type": "text", "text": content},
            {"type": "image_url", "image_url": {"url": make_image(number % 5)}},
        ]
    more: dict[str, Any] = {"temperature": 0.0 if number % 2 else 0.8, "seed": number, "n": 2 - number % 2}
    if number % 7 == 0:
        more["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 16, **more}


def texts(running: RunningServer, count: int) -> list[list[str]]:
    """All answers, asked eight at a time over connections of their own."""

    def one(number: int) -> list[str]:
        answer = httpx.post(running.url + "/v1/chat/completions", json=ask(number), timeout=240)
        assert answer.status_code == 200, answer.text
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(count)))


def api_pids(running: RunningServer) -> list[int]:
    children = psutil.Process(running.process.pid).children()
    return [child.pid for child in children if "trencadis.server.processes.api_worker_process_main" in words_of(child)]


def listening(running: RunningServer) -> list[int]:
    """The API processes that take connections."""
    found = []
    for pid in api_pids(running):
        with contextlib.suppress(psutil.Error):
            if any(c.status == psutil.CONN_LISTEN for c in psutil.Process(pid).net_connections()):
                found.append(pid)
    return found


def test_two_api_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, seconds=240) as running:
        expected = texts(running, 40)
    for more in (("--api-server-count", "2"), ("--api-server-count", "3", "-dp", "2")):
        with server(tmp_path, *FLAGS, *more, seconds=240) as running:
            assert texts(running, 40) == expected
            shown = running.http.get("/metrics").text
            ended = [
                float(line.split()[-1]) for line in shown.splitlines() if line.startswith("vllm:request_success_total")
            ]
            assert sum(ended) == sum(map(len, expected)), "each choice counts once"
            labels = {line.split('engine="')[1][0] for line in shown.splitlines() if "request_success_total{" in line}
            assert len(labels) == (2 if "-dp" in more else 1)
            assert len(api_pids(running)) == int(more[1])


def test_an_image_is_named_by_uuid_whichever_process_has_prepared_it(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(SHAPES.read_bytes()).decode()

    def say(part: dict[str, Any]) -> httpx.Response:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is in the picture?"}]}]
        # A connection of its own, so that it comes to any process.
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        return httpx.post(running.url + "/v1/chat/completions", json=body, timeout=240)

    with server(tmp_path, *FLAGS, "--api-server-count", "2", seconds=240) as running:
        first = say({"type": "image_url", "image_url": {"url": url}, "uuid": "shapes"})
        assert first.status_code == 200, first.text
        for _ in range(12):
            again = say({"type": "image_url", "image_url": None, "uuid": "shapes"})
            assert again.status_code == 200, again.text
            assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
        other = {"type": "image_url", "image_url": {"url": make_image(3)}, "uuid": "shapes"}
        assert {say(other).status_code for _ in range(8)} == {409}
        shown = running.http.get("/metrics").text
        assert "vllm:images_encoded_total" in shown and running.http.get("/stats").json()["image_arena"]["encoded"] == 1


@pytest.mark.parametrize("flags", [("--api-key-file", "nowhere.yaml"), ("--chat-template", "{% broken")])
def test_what_one_process_refuses_several_refuse_with_the_same_line(flags: tuple[str, str], tmp_path: Path) -> None:
    said = []
    for count in ("1", "2"):
        command = [sys.executable, "-P", "-m", "trencadis.server", "--host", "127.0.0.1", "--port", "0", *FLAGS, *flags]
        done = subprocess.run(
            [*command, "--api-server-count", count], capture_output=True, text=True, timeout=240, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        said.append((done.returncode, done.stderr.splitlines()[-1]))
        assert "Traceback" not in done.stderr
    assert said[0] == said[1] and said[0][0] == 2


def test_processes_killed_again_and_again_lose_their_own_requests_only(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS, "--api-server-count", "2", seconds=240) as running:
        with ThreadPoolExecutor(8) as pool:

            def one(number: int) -> int:
                try:
                    return httpx.post(running.url + "/v1/chat/completions", json=ask(number), timeout=240).status_code
                except httpx.HTTPError:
                    return 0

            answers = [pool.submit(one, i) for i in range(120)]
            for number in range(4):
                time.sleep(1.0)
                end = time.monotonic() + 120
                while len(up := listening(running)) < 2:
                    assert time.monotonic() < end, "a process that has died is started again"
                    time.sleep(0.05)
                os.kill(up[number % 2], signal.SIGKILL)
            got = [answer.result() for answer in answers]
        print(f"{got.count(200)} of {len(got)} answered under 4 kills, {got.count(0)} lost their connection")
        assert set(got) <= {200, 0} and got.count(0) <= 4 * 8, "no more than a dead process had"
        end = time.monotonic() + 60
        while (stats := running.http.get("/stats").json())["running"] or running.http.get("/load").json()[
            "server_load"
        ]:
            assert time.monotonic() < end, stats
            time.sleep(0.1)
        assert stats["restarts"] == 0, "the engine did not notice"
        assert json.loads(running.http.get("/health").text)["status"] == "ok"
