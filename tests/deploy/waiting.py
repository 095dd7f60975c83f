"""Waits for a server that a test started by other means than ``tests.traffic.server_process``."""

from __future__ import annotations

import subprocess
import time

import httpx


def until_ready(url: str, process: subprocess.Popen[bytes], seconds: float = 180) -> None:
    """Until ``url`` answers 200; fails if the process ends."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, process.returncode
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} did not answer 200")
