"""``trencadis serve`` with an engine, and by default an app, that are fakes: its lines, its signals, its exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import trencadis

ROOT = str(Path(trencadis.__file__).resolve().parent.parent)
ENGINE = ["--engine", "tests.fakes.counting_engine:CountingEngine.create"]
APP = ["--app", "tests.fakes.counting_app:build_app"]


class FakeServer:
    """``trencadis serve`` on a free port of the loopback; its lines are collected."""

    def __init__(self, *words: str, cwd: Path | None = None, fakes: tuple[str, ...] = (*ENGINE, *APP), **environ: Any):
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {"PYTHONPATH": path} | environ
        command = [sys.executable, "-P", "-m", "trencadis.server", "--host", "127.0.0.1", "--port", "0", *fakes, *words]
        self.process = subprocess.Popen(command, env=env, cwd=cwd, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = 75.0) -> re.Match[str]:
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, self.text
            time.sleep(0.02)
        return found

    @property
    def url(self) -> str:
        return self.wait_for(r"listening on (http://127\.0\.0\.1:\d+)")[1]

    def end(self, seconds: float = 50.0) -> int:
        code = self.process.wait(seconds)
        self.reader.join()
        return code

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: Any) -> None:
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        self.process.kill()
        self.end()
        _, alive = psutil.wait_procs(children, 5)
        assert not alive
