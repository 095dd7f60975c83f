"""Every kind of process is killed and stopped under load: noticed, replaced, and nothing is left behind."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from tests.traffic.server_process import RunningServer, server
from trencadis.assets import demo_path
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.process.child_process_environment_and_exit import StopWatch, read_stat
from trencadis.server.processes.api_process_supervisor import ApiProcess

NOTICED = 5.0
"""Seconds within which a lost process is noticed."""
BACK = 60.0
"""Seconds within which requests are answered again: a start on a busy machine."""
REFUSED = 2.0
"""Seconds after which a dead server refuses connections."""
KINDS = {
    "api": "api_worker_process_main", "engine": "engine_process", "rank": "rank_process", "decode": "worker_main",
}  # fmt: skip
FLAGS = ("--api-server-count", "2", "--tensor-parallel-size", "2", "--max-engine-restarts", "100", "--threads", "1")


def find_processes(root: int, kind: str) -> list[psutil.Process]:
    """The processes of a kind below ``root``."""
    found = []
    for one in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(KINDS[kind] in word for word in one.cmdline()):
                found.append(one)
    return found


def make_image(shade: int) -> str:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), (shade % 256, 90, 120)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def chat(client: httpx.Client, number: int) -> int:
    """The status of one chat with an image; 0: the connection failed."""
    content = [{"type": "image_url", "image_url": {"url": make_image(number)}}, {"type": "text", "text": "What?"}]
    try:
        return client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], "max_tokens": 8}
        ).status_code
    except httpx.HTTPError:
        return 0


class Load:
    """Four clients that chat until it ends."""

    def __init__(self, url: str) -> None:
        self._ends, self.statuses = threading.Event(), list[tuple[float, int]]()
        self._threads = [threading.Thread(target=self._run, args=(url, i), daemon=True) for i in range(4)]

    def _run(self, url: str, number: int) -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            while not self._ends.is_set():
                number += 4
                status = chat(client, number)
                self.statuses.append((time.monotonic(), status))
                if status != 200:
                    time.sleep(0.1)

    def __enter__(self) -> Load:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for one in self._threads:
            one.join(90)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until_gone(victim: psutil.Process, seconds: float) -> float:
    """The seconds until a process has ended; its zombie may wait for its parent."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        try:
            if victim.status() == psutil.STATUS_ZOMBIE:
                return time.monotonic() - begun
        except psutil.NoSuchProcess:
            return time.monotonic() - begun
        time.sleep(0.02)
    return float("inf")


def lose(running: RunningServer, kind: str, how: signal.Signals) -> dict[str, Any]:
    """One round: what became of a lost process, in seconds, and statuses of requests after it was noticed."""
    root = running.process.pid
    with Load(running.url):
        time.sleep(1)
        victims = find_processes(root, kind)
        assert victims, kind
        victim = random.choice(victims)
        begun = time.monotonic()
        os.kill(victim.pid, how)
        noticed = wait_until_gone(victim, 3 * NOTICED)
        wrong, back = list[int](), float("inf")
        with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
            while time.monotonic() - begun < BACK:
                healthy = is_healthy(running.url)
                status = chat(client, int(1000 * time.monotonic()))
                if healthy and status != 200 and time.monotonic() - begun > NOTICED:
                    wrong.append(status)
                if healthy and status == 200:
                    back = time.monotonic() - begun
                    break
                time.sleep(0.2)
    return {"kind": kind, "how": how.name, "noticed": round(noticed, 2), "back": round(back, 2), "wrong": wrong}


def list_left_behind(folder: Path) -> list[str]:
    """What is left in the server's folder for temporary files."""
    return sorted(p.name for p in folder.glob("trencadis*"))


def rounds(seed: int, count: int) -> Iterator[tuple[str, signal.Signals]]:
    """Each kind killed and stopped once, in a random order, then random ones."""
    rng = random.Random(seed)
    every = [(kind, how) for kind in KINDS for how in (signal.SIGKILL, signal.SIGSTOP)]
    rng.shuffle(every)
    yield from every[:count]
    for _ in range(count - len(every)):
        yield rng.choice(every)


@pytest.mark.long
def test_ten_rounds(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with server(tmp_path, "--model", str(demo_path()), *FLAGS, TMPDIR=str(temporary)) as running:
        root, port = running.process.pid, int(running.url.rpartition(":")[2])
        found = []
        for kind, how in rounds(random.randrange(1000), 10):
            found.append(lose(running, kind, how))
            print(found[-1], flush=True)
        children = psutil.Process(root).children(recursive=True)
        os.kill(root, signal.SIGKILL)
        begun = time.monotonic()
        while time.monotonic() - begun < 3 * REFUSED:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.02)
        refused = time.monotonic() - begun
        _, alive = psutil.wait_procs(children, 3 * NOTICED)
    print("refuses after", round(refused, 2), "left", list_left_behind(temporary))
    assert all(one["noticed"] <= NOTICED and one["back"] <= BACK and not one["wrong"] for one in found), found
    assert refused <= REFUSED and not alive and not list_left_behind(temporary)


def test_an_api_process_that_is_stopped_while_it_starts_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for a sign of life before it is ready, which it will never be."""
    pause = asyncio.sleep
    monkeypatch.setattr("trencadis.server.processes.api_process_supervisor.asyncio.sleep", lambda seconds: pause(0.01))

    async def watch(process: subprocess.Popen[bytes], stopped: bool) -> bool:
        starting = ApiProcess.__new__(ApiProcess)
        starting.handle, starting.index, starting.ready_since = process, 1, None
        if stopped:
            process.send_signal(signal.SIGSTOP)
        task = asyncio.create_task(starting._watch(None))  # type: ignore[arg-type]
        await asyncio.wait([task], timeout=0.3)
        task.cancel()
        return process.poll() is not None

    for stopped in (False, True):
        with subprocess.Popen(["sleep", "60"]) as process:
            assert asyncio.run(watch(process, stopped)) is stopped
            process.kill()


def test_a_killed_engine_leaves_no_folder_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as process:
        own, other = (tmp_path / f"trencadis-ranks-{pid}-abc" for pid in (process.pid, f"{process.pid}0"))
        for folder in (own, other):
            folder.mkdir()
            (folder / "store").touch()
        EngineHandle(process, socket.socket()).kill()
    assert not own.exists() and other.exists()


def test_a_stopped_process_is_told_from_one_that_works() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        watch = StopWatch(process, looks=2)
        assert not watch.look() and read_stat(process.pid)[0] in "SRD"
        process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 10
        while read_stat(process.pid)[0] != "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert [watch.look(), watch.look()] == [False, True]
        process.send_signal(signal.SIGCONT)
        while read_stat(process.pid)[0] == "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert not watch.look()
        process.kill()
    assert read_stat(process.pid) == ["X"] and not StopWatch(object()).look()
