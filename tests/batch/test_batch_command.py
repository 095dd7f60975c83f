"""``run-batch`` as a command: its flags, URLs, signals, runs that are killed and resumed, and its memory."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from tests.batch.files import read, request, write
from tests.bench.paced_server import ROOT, paced
from trencadis.core.errors import StartupError
from trencadis.server.cli import batch_targets, run_batch

DEADLINE = 300


def test_wrong_command_lines_are_one_line(tmp_path):
    there = str(write(tmp_path / "in.jsonl", [request(0)]))
    out = str(tmp_path / "o")
    for words, why in (
        (["-i", there, "-o", out, "--base-url", "http://127.0.0.1:9", "--model", "x"], "--model is for an engine"),
        (["-i", there, "-o", out, "--base-url", "127.0.0.1:9"], "must begin with http"),
        (["-i", there, "-o", out, "--base-url", "http://u:pw@127.0.0.1:9/v1"], "answers at http://127.0.0.1:9 "),
        (["-i", there, "-o", there, "--base-url", "http://127.0.0.1:9"], "the same file"),
        (["-i", out, "-o", there, "--base-url", "http://127.0.0.1:9"], "no such file"),
        (["-i", there, "-o", "http://127.0.0.1:9/x", "--resume"], "--resume needs an output file on this machine"),
        (["-i", there, "-o", out, "--max_concurrency=0"], "at least 1"),
        (["-i", there, "-o", out + "/x/y", "--base-url", "http://127.0.0.1:9"], "there is no folder"),
        (["-i", there, "-o", out, "--output-tmp-dir", out, "--base-url", "http://x"], "there is no such folder"),
        (["-i", there, "-o", out, "--no-such-flag"], "unknown flag --no-such-flag"),
    ):  # fmt: skip
        with pytest.raises(StartupError, match=why):
            run_batch.main(words)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", (request(i) for i in range(3)))
    with paced() as url:
        args = ["-i", str(tmp_path / "in.jsonl"), "-o", "/dev/full", "--base-url", url]
        with pytest.raises(StartupError, match=r"/dev/full: No space left on device; --resume"):
            run_batch.main(args)


def test_keys_come_from_the_environment_alone():
    assert batch_targets.find_api_key({}) == "" and batch_targets.find_api_key({"OPENAI_API_KEY": "o"}) == "o"
    assert batch_targets.find_api_key({"OPENAI_API_KEY": "o", "VLLM_API_KEY": "v"}) == "v"
    server = batch_targets.RunningServer("http://x/v1/", "v", 4)
    assert server.url == "http://x" and server.client.headers["authorization"] == "Bearer v"
    assert batch_targets.redact_url("https://me:secret@host:1/a?sig=secret") == "https://host:1/a"


@pytest.mark.long
def test_a_batch_on_the_demo_model_starts_and_ends_an_engine(tmp_path):
    write(tmp_path / "in.jsonl", (request(i, url="/v1/chat/completions") for i in range(40)))
    words = ["-i", "in.jsonl", "-o", "out.jsonl", "--kv-cache-memory-bytes", "64MiB", "--max_num_seqs", "4"]
    process = subprocess.run(
        [sys.executable, "-P", "-m", "trencadis.server.cli.main", "run-batch", *words], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": ROOT, "VLLM_API_KEY": "secret-key"}, capture_output=True, timeout=DEADLINE,
    )  # fmt: skip
    assert process.returncode == 0 and "secret-key" not in process.stderr, process.stderr
    assert [line["response"]["status_code"] for line in read(tmp_path / "out.jsonl")] == [200] * 40


class FileServer(HTTPServer):
    """Has one file, and takes one."""

    content, taken, refuse = b"", b"", 0
    tries: ClassVar[list[str]] = []


class Files(BaseHTTPRequestHandler):
    """Serves one file by GET, takes one by PUT; fails at the first of each."""

    server: FileServer

    def do_GET(self):
        self._once(self.server.content)

    def do_PUT(self):
        self.server.taken = self.rfile.read(int(self.headers["content-length"]))
        self._once(b"")

    def _once(self, content):
        self.server.tries.append(self.command)
        failing = self.server.tries.count(self.command) == 1
        self.send_response(self.server.refuse or (500 if failing else 200))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_input_and_output_may_lie_behind_urls(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_targets, "PAUSE", 0.0)
    web = FileServer(("127.0.0.1", 0), Files)
    web.content = "".join(json.dumps(request(i)) + "\n" for i in range(5)).encode()
    threading.Thread(target=web.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{web.server_port}/file?signature=secret"
    try:
        with paced() as url:
            words = ["-i", at, "-o", at, "--base-url", url + "/v1", "--output-tmp-dir", str(tmp_path)]
            assert run_batch.main(words) == 0
            assert [json.loads(x)["custom_id"] for x in web.taken.splitlines()] == [f"r{i}" for i in range(5)]
            assert web.tries == ["GET", "GET", "PUT", "PUT"] and not list(tmp_path.iterdir())
            web.refuse = 403
            with pytest.raises(StartupError, match=r"/file: the server answered 403\.$"):
                run_batch.main(words)
    finally:
        web.shutdown()
        web.server_close()


def run(folder: Path, url: str, *more: str) -> subprocess.Popen[str]:
    words = ["-i", "in.jsonl", "-o", "out.jsonl", "--base-url", url, *more]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "trencadis.server.cli.main", "run-batch", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": ROOT}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def killed_and_resumed(folder: Path, kills: int, count: int, seed: int) -> None:
    rng, out = random.Random(seed), folder / "out.jsonl"
    write(folder / "in.jsonl", (request(i) for i in range(count)))
    with paced(ttft=0.02) as url:
        for kill in range(kills):
            until = size_of(out) + rng.randrange(1, 4000)
            process = run(folder, url, "--resume", "--max-concurrency", "4")
            end = time.monotonic() + DEADLINE
            while process.poll() is None and size_of(out) < until:
                assert time.monotonic() < end
                time.sleep(0.005)
            assert process.poll() is None, f"it ended before kill {kill}"
            process.send_signal(signal.SIGKILL)
            process.communicate()
        process = run(folder, url, "--resume", "--max-concurrency", "64")
        said = process.communicate(timeout=DEADLINE)[1]
        served = httpx.get(url + "/served", trust_env=False).json()["served"]
    assert process.returncode == 0, said
    assert [line["custom_id"] for line in read(out)] == [f"r{i}" for i in range(count)]
    assert len(served) == count and sum(served.values()) < count + kills * 16


def test_a_run_that_is_killed_and_resumed_answers_each_line_once(tmp_path):
    killed_and_resumed(tmp_path, kills=2, count=400, seed=0)


@pytest.mark.long
def test_twenty_kills(tmp_path):
    killed_and_resumed(tmp_path, kills=20, count=4000, seed=1)


def test_a_signal_leaves_whole_lines_and_exit_code_1(tmp_path):
    write(tmp_path / "in.jsonl", (request(i) for i in range(500)))
    with paced(ttft=0.1) as url:
        process = run(tmp_path, url, "--max-concurrency", "4")
        end = time.monotonic() + DEADLINE
        while not (tmp_path / "out.jsonl").exists() or len(read(tmp_path / "out.jsonl")) < 8:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=DEADLINE)[1]
    found = read(tmp_path / "out.jsonl")
    assert process.returncode == 1 and "Traceback" not in said
    assert f"the batch ended after {len(found)} of 500 lines; --resume goes on" in said
    assert [line["custom_id"] for line in found] == [f"r{i}" for i in range(len(found))]


@pytest.mark.long
def test_200000_lines_take_under_300_mb(tmp_path, capsys):
    """Measures the whole process: VmHWM at its end, over the route of a running server."""
    count = 200_000
    with (tmp_path / "in.jsonl").open("w") as file:
        for i in range(count):
            file.write(json.dumps(request(i, f"question {i} " + "word " * 200)) + "\n")
    with paced() as url:
        process, peak = run(tmp_path, url), 0
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int((re.search(r"VmHWM:\s+(\d+)", status) or ["", "0"])[1]))
            time.sleep(0.2)
        said = process.communicate()[1]
    assert process.returncode == 0, said
    with (tmp_path / "out.jsonl").open("rb") as file:
        assert all(json.loads(line)["custom_id"] == f"r{i}" for i, line in enumerate(file))
    with capsys.disabled():
        print(f"\n{count} lines: peak of the whole process {peak / 1024:.0f} MiB; {said.splitlines()[-1]}")
    assert peak < 300 * 1024
