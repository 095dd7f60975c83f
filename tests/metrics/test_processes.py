"""CPU and memory by role, over processes that play the parts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trencadis.server.metrics.process_tenant_and_sleep_collectors import API, OTHER, ROLES, ProcessesCollector, get_role

BURN = """
import time
end = time.process_time() + {}
while time.process_time() < end:
    pass
print("x", flush=True)
input()
"""


def samples(collector: ProcessesCollector) -> dict[str, dict[str, float]]:
    return {f.name: {s.labels["role"]: s.value for s in f.samples} for f in collector.collect()}


def test_roles_are_named_by_modules_that_exist() -> None:
    assert all(importlib.util.find_spec(module) for module in ROLES)
    command = b"/usr/bin/python3\0-P\0-m\0trencadis.core.process.engine_process\x007\0"
    assert get_role(command) == "engine" and get_role(b"sh\0-c\0true\0") == OTHER


def test_a_process_counts_while_it_lives_and_its_seconds_stay() -> None:
    collector = ProcessesCollector()
    before = samples(collector)
    others = before["vllm:server_processes"]["decode_worker"]  # of tests that ran before in this process
    burnt_before = before["vllm:server_cpu_seconds"]["decode_worker"]
    child: list[subprocess.Popen[str]] = []

    def start() -> None:
        # From a thread, as decode workers are: the kernel lists it under the thread.
        words = [sys.executable, "-S", "-c", BURN.format(0.2), "trencadis.multimodal.decode_workers.worker_main"]
        child.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert child[0].stdout is not None and child[0].stdout.readline()
        done.wait()

    done = threading.Event()
    thread = threading.Thread(target=start)
    thread.start()
    try:
        end = time.monotonic() + 20
        while samples(collector)["vllm:server_processes"]["decode_worker"] == others and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.15)
        assert child[0].poll() is None
        while (
            samples(collector)["vllm:server_cpu_seconds"]["decode_worker"] < burnt_before + 0.1
            and time.monotonic() < end
        ):
            time.sleep(0.01)
        now = samples(collector)
        assert now["vllm:server_processes"]["decode_worker"] == others + 1
        assert now["vllm:server_resident_memory_bytes"]["decode_worker"] > 1 << 20
        burnt = now["vllm:server_cpu_seconds"]["decode_worker"]
        assert (
            burnt >= burnt_before + 0.1 - 1e-6
            and now["vllm:server_cpu_seconds"][API] >= before["vllm:server_cpu_seconds"][API] - 1e-6
        )
    finally:
        done.set()
        thread.join()
        child[0].communicate("\n")
    after = samples(collector)
    assert after["vllm:server_processes"]["decode_worker"] == others
    assert others or after["vllm:server_resident_memory_bytes"]["decode_worker"] == 0
    assert after["vllm:server_cpu_seconds"]["decode_worker"] >= burnt - 1e-6


def test_figures_are_those_of_the_kernel() -> None:
    now = samples(ProcessesCollector())
    assert now["vllm:server_processes"][API] == 1
    spent = sum(os.times()[:2])
    assert now["vllm:server_cpu_seconds"][API] == pytest.approx(spent, abs=0.1)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert now["vllm:server_resident_memory_bytes"][API] == pytest.approx(resident, rel=0.05)


def test_where_the_kernel_shows_nothing_there_are_no_samples(tmp_path: Path) -> None:
    assert list(ProcessesCollector(proc=tmp_path).collect()) == []
