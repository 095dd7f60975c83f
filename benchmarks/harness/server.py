"""Runs a server on the loopback, and reads from /proc what it and its engine use."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import httpx
import psutil

from benchmarks.harness.reporting import environment

START_LIMIT = 900.0  # another engine may compile for minutes
STOP_LIMIT = 60.0


class Server:
    """A running ``serve``. Made by ``serving``.

    Args:
        command: another server that takes ``--host`` and ``--port``; without one, ours.
        variables: environment variables beside those of this process.
    """

    ready = 0.0
    """Seconds from its start until it accepts requests."""

    def __init__(
        self, flags: Sequence[str], command: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop
        ours = [sys.executable, "-P", "-m", "trencadis.server"]
        quiet = [] if command else ["--disable-uvicorn-access-log"]
        self.path = "/health" if command else "/ready"
        line = [*(command or ours), *flags, "--host", "127.0.0.1", "--port", str(self.port), *quiet]
        self.begun = time.perf_counter()
        environ = {**environment(), **(variables or {})}
        self.process = subprocess.Popen(line, env=environ, stdout=self.log, stderr=self.log)

    def wait_ready(self, interval: float = 0.02) -> float:
        """Seconds from its start to the first 200 of ``/ready``.

        Raises:
            RuntimeError: it ended, or takes longer than START_LIMIT; with the last lines it said.
        """
        with httpx.Client(base_url=self.url, timeout=5, trust_env=False) as client:
            while time.perf_counter() - self.begun < START_LIMIT and self.process.poll() is None:
                try:
                    if client.get(self.path).status_code == 200:
                        self.ready = time.perf_counter() - self.begun
                        return self.ready
                except httpx.TransportError:
                    pass
                time.sleep(interval)
        raise RuntimeError(f"the server did not become ready:\n{self.last_words()}")

    def last_words(self, count: int = 2000) -> str:
        """The end of its log."""
        self.log.seek(0)
        return self.log.read()[-count:]

    def pids(self) -> list[int]:
        """The API process, then the engine and whatever else it started."""
        return [self.process.pid, *(c.pid for c in psutil.Process(self.process.pid).children(recursive=True))]

    @cached_property
    def engine(self) -> int:
        """The engine's process, which may not be another one later."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "trencadis.core.process.engine_process" in child.cmdline():
                return child.pid
        raise RuntimeError("the server has no engine process")

    def model(self) -> str:
        """The model's name in the API."""
        answer = httpx.get(self.url + "/v1/models", trust_env=False).json()
        return str(answer["data"][0]["id"])

    def stop(self) -> None:
        """Sends SIGTERM and waits; kills what is left after STOP_LIMIT."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                for p in children:
                    p.kill()
                self.process.kill()
                self.process.wait()
        self.log.close()


@contextmanager
def serving(
    *flags: str, command: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A context manager: a ready server, which is stopped at the end. ``command`` starts another server than ours."""
    server = Server(flags, command, variables)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def vllm_command(python: str) -> list[str]:
    """The command of vLLM's OpenAI server of a Python, without prefix cache: no two requests share a prefix."""
    return [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching", "--model"]


VLLM_CORES = "VLLM_CPU_NUM_OF_RESERVED_CPU"
"""vLLM's variable: cores on which it does not compute. It reserves one for its server where the variable is unset."""


def vllm_variables() -> dict[str, str]:
    """Variables with which vLLM computes on all cores, as ours does; a value in the environment stays."""
    return {VLLM_CORES: os.environ.get(VLLM_CORES, "0")}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def memory_of(pid: int) -> dict[str, int]:
    """Memory of a process in bytes; empty if it has ended.

    ``pss``: pages shared with others counted by their share, which changes as others that map the same files come and
    go. ``own``: what does not: its memory that no file backs, and file-backed pages in full. ``mapped``: the part of
    both that is shared memory without a file, here the KV pool and the rows of images.
    """
    try:
        pages = re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        kinds = re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    except (FileNotFoundError, ProcessLookupError):
        return {}
    kb = {name: int(value) * 1024 for name, value in (*pages, *kinds)}
    own = kb["Pss_Anon"] + kb["Pss_Shmem"] + kb["RssFile"]
    return {"pss": kb["Pss"], "own": own, "mapped": kb["Pss_Shmem"]}


def maps(pid: int, what: str) -> bool:
    """Whether a mapped file's path holds ``what``."""
    return any(what in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def imported(pid: int) -> dict[str, bool]:
    """Which heavy packages a process has loaded, by the shared objects that it maps.

    transformers has none of its own, but imports regex, whose extension is nobody else's here.
    """
    return {"torch": maps(pid, "/libtorch"), "transformers": maps(pid, f"{os.sep}regex{os.sep}_regex")}
