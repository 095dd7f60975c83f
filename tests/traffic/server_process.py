"""A real server process on loopback for tests: started by its command line, stopped by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START = 450.0
"""Seconds that a start may take: against hangs, on a machine where twenty others compute on two cores."""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class RunningServer:
    """A running server: its base URL, its process and what it printed."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def text(self) -> str:
        """Everything it printed so far."""
        return self.log.read_text(errors="replace")

    def engine_pids(self) -> list[int]:
        """Its engine processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(p) for p in children if b"core.proc" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def wait(self, path: str = "/ready", seconds: float = START, status: int = 200) -> None:
        """Until ``path`` answers ``status``, asked ever less often: a question costs two processes milliseconds."""
        end, pause = time.monotonic() + seconds, 0.05
        while time.monotonic() < end:
            assert self.process.poll() is None, self.text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get(path).status_code == status:
                    return
            time.sleep(pause)
            pause = min(1.3 * pause, 0.25)
        raise AssertionError(f"{path} did not answer {status}: {self.text()[-3000:]}")


@contextlib.contextmanager
def server(folder: Path, *flags: str, seconds: float = START, **environ: str) -> Iterator[RunningServer]:
    """``trencadis serve`` with ``flags``, ready within ``seconds``; ended by SIGTERM, then by force."""
    port = free_port()
    log = folder / f"server-{port}.log"
    command = [sys.executable, "-P", "-m", "trencadis.server", "--host", "127.0.0.1", "--port", str(port), *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environ}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=folder)
    running = RunningServer(process, f"http://127.0.0.1:{port}", log)
    try:
        running.wait(seconds=seconds)
        yield running
    finally:
        running.http.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


DECODE_WORKER = "trencadis.multimodal.decode_workers.worker_main"
"""The module that a decode worker's command line names."""


def is_decode_worker(pid: int) -> bool:
    """Whether process ``pid`` decodes media."""
    return DECODE_WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def words_of(process: psutil.Process) -> list[str]:
    """A process's command line; none where it has just ended, as a zombie that nobody has waited for yet."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
