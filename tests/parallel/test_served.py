"""Two ranks behind a real server: a killed rank ends open requests with a retryable 503, and the engine comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.traffic.server_process import RunningServer, server

FLAGS = (
    "--device", "cpu", "-tp", "2", "--max-num-seqs", "4", "--max-model-len", "1024", "--kv-cache-memory-bytes", "64MiB",
    "--mm-processor-kwargs", '{"max_pixels": 50176}',
)  # fmt: skip
ASK = [{"role": "user", "content": "hello"}]


def ranks_of(running: RunningServer) -> list[int]:
    """Processes of the ranks beyond the first."""
    found = []
    for engine in running.engine_pids():
        for task in Path(f"/proc/{engine}/task").iterdir():
            found += [int(p) for p in (task / "children").read_text().split()]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_rank_and_a_killed_engine(tmp_path: Path) -> None:
    with server(tmp_path, *FLAGS) as running:
        assert "2 ranks" in running.http.get("/health").json()["device"]
        seen: list[httpx.Response] = []
        body = {"messages": ASK, "max_tokens": 900, "ignore_eos": True}

        def ask() -> None:
            seen.append(httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=300, trust_env=False))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.7)
        (rank,) = ranks_of(running)
        os.kill(rank, signal.SIGKILL)
        for thread in threads:
            thread.join(150)
        assert [r.status_code for r in seen] == [503] * 3 and all("retry" in r.text for r in seen)
        running.wait()
        assert "rank 1 died: killed by SIGKILL" in running.text()
        assert running.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 2}).status_code == 200

        (rank,), (engine,) = ranks_of(running), running.engine_pids()
        os.kill(engine, signal.SIGKILL)
        end = time.monotonic() + 50
        while alive(rank):
            assert time.monotonic() < end, "a rank outlived its engine"
            time.sleep(0.02)


@pytest.mark.long
def test_sizes_are_refused_in_one_line(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-P", "-m", "trencadis.server", "--device", "cpu", "-tp", "3", "--port", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert ended.returncode == 2
    (line,) = [x for x in (ended.stdout + ended.stderr).splitlines() if "tensor-parallel-size" in x]
    assert "does not divide" in line and line.rstrip().endswith("use 1, 2, 4.")
