"""Fifty sleeps and wakes of a whole server with the demo model: answers equal, memory flat, no process left."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.traffic.server_process import RunningServer, server

pytestmark = pytest.mark.long
FLAGS = ("--enable-sleep-mode", "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "512")
BODY = {"messages": [{"role": "user", "content": "Hello there"}], "temperature": 0, "max_tokens": 16, "logprobs": True}


def resident(running: RunningServer) -> int:
    return psutil.Process(running.process.pid).memory_info().rss


def asleep(running: RunningServer) -> None:
    """Puts the engine to sleep; nothing of it is left."""
    pids = running.engine_pids()
    tree = [p for pid in pids for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    assert running.http.post("/sleep?level=2").json() == {"status": "sleeping", "level": 2}
    assert not running.engine_pids()
    psutil.wait_procs(tree, 10)
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    for path in ("/live", "/health", "/ready"):
        assert running.http.get(path).status_code == 200


@pytest.mark.parametrize(("device", "cycles"), [("cpu", 50), ("hpu", 3)], ids=["cpu", "hpu, emulated"])
def test_answers_are_equal_and_memory_is_flat(device: str, cycles: int, tmp_path: Path) -> None:
    flags = ("--device", "hpu", "--warmup", "skip", "--max-num-seqs", "4") if device == "hpu" else ()
    environ = {"TRENCADIS_HPU_EMULATOR": "1", "TRENCADIS_CACHE": str(tmp_path)} if device == "hpu" else {}
    with server(tmp_path, *FLAGS, *flags, seconds=300, **environ) as running:
        running.http.timeout = 600
        first = running.http.post("/v1/chat/completions", json=BODY).json()["choices"]
        figures, seconds = [], []
        for i in range(cycles):
            asleep(running)
            begun = time.monotonic()
            if i % 2:
                assert running.http.post("/wake_up").json() == {"status": "awake", "tags": None}
            assert running.http.post("/v1/chat/completions", json=BODY).json()["choices"] == first
            seconds.append(time.monotonic() - begun)
            figures.append(resident(running))
        print(f"{device}: {cycles} sleeps, API process {figures[0] >> 20} to {figures[-1] >> 20} MiB, "
              f"awake after {min(seconds):.1f} to {max(seconds):.1f} s")  # fmt: skip
        assert figures[-1] - figures[min(4, cycles - 1)] < 8 << 20
        text = running.http.get("/metrics").text
        assert 'vllm:engine_restarts_total{engine="0",model_name="trencadis-demo"} 0.0' in text
        assert f'duration_seconds_count{{operation="wake"}} {float(cycles)}' in text
