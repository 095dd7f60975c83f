"""Clients that hang up at any moment leave nothing behind: no block, request, thread, socket or temporary file."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.operations.fake_server import ENGINE, FakeServer

SETTLE = 60.0
"""Seconds in which the server must be empty again, five times what it may take."""


def hang_up(port: int, seed: int) -> None:
    """One request of a random kind, cut off after a random time: in its head, its body, its answer; closed or reset."""
    rng = random.Random(seed)
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 8, 400)), "stream": rng.random() < 0.5, "ignore_eos": True}
    if rng.random() < 0.5:
        path, body["prompt"] = "/v1/completions", ["Hello"] * rng.choice((1, 3))
    else:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hello " * rng.choice((1, 200))}]
        body["n"], body["temperature"] = rng.choice((1, 2)), 1
    data = json.dumps(body).encode()
    late = rng.choice(("", "", "x-request-timeout: 0.05\r\n"))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{late}"
    sent = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    if rng.random() < 0.2:
        sent = sent[: rng.randrange(len(sent))]
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as s:
        s.sendall(sent)
        time.sleep(rng.choice((0.0, 0.005, 0.05, 0.2)))
        if rng.random() < 0.3:
            s.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                s.recv(rng.choice((1, 1 << 16)))
        if rng.random() < 0.5:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset


def held(server: FakeServer) -> tuple[int, int, int]:
    """Threads, sockets and other descriptors of the API process."""
    process = psutil.Process(server.process.pid)
    names = [os.readlink(f) for f in Path(f"/proc/{server.process.pid}/fd").iterdir() if f.is_symlink()]
    sockets = sum(name.startswith("socket:") for name in names)
    return process.num_threads(), sockets, len(names) - sockets


def empty(http: httpx.Client) -> bool:
    """Whether neither the engine nor the queue holds anything."""
    stats = http.get("/stats").json()
    inside = [line for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:admission_inside{")]
    held = (stats["running"], stats["waiting"], stats["kv_blocks"]["used"])
    return held == (0, 0, 0) and all(line.endswith(" 0.0") for line in inside)


def leaves_nothing(fakes: tuple[str, ...], folder: Path, count: int, *words: str) -> None:
    files = folder / "tmp"
    files.mkdir()
    with FakeServer(*words, fakes=fakes, cwd=folder, TMPDIR=str(files)) as server:
        server.wait_for("Uvicorn running on", 300)
        port = int(server.url.rpartition(":")[2])
        with httpx.Client(base_url=server.url, trust_env=False, timeout=120) as http:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda seed: hang_up(port, seed), range(20)))  # threads of pools start once
                before = held(server)
                list(pool.map(lambda seed: hang_up(port, seed), range(20, count)))
            end = time.monotonic() + SETTLE
            while not (empty(http) and all(a <= b + 2 for a, b in zip(held(server), before, strict=True))):
                assert time.monotonic() < end, (held(server), before, http.get("/stats").json())
                time.sleep(0.1)
            reported = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
            assert reported.status_code == 200
            print(f"{count} clients hung up: (threads, sockets, files) {before} -> {held(server)}")
        assert not [name for name in os.listdir(files) if "trencadis" in name]
        assert "Traceback" not in server.text, server.text[server.text.find("Traceback") :][:6000]
        server.process.terminate()
        assert server.end() == 0
    assert os.listdir(files) == []


def test_some_disconnects_leave_nothing(tmp_path: Path) -> None:
    """Over an engine of counted tokens; the long test has a real one."""
    leaves_nothing((*ENGINE,), tmp_path, 60)


@pytest.mark.long
def test_two_thousand_disconnects_leave_nothing(tmp_path: Path) -> None:
    leaves_nothing((), tmp_path, 2000, "--device", "cpu", "--threads", "1", "--kv-cache-memory-bytes", "64MiB")
