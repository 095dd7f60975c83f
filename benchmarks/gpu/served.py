"""A chat with ``serve`` itself over HTTP on the loopback: the demo checkpoint, one streamed answer.

python -m benchmarks.gpu.served OUT [--device cuda] [--policy twin] [WHEELS ...]

Packages that this Python lacks may be given as wheels, which are unpacked beside the checkout for this run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from benchmarks.harness.reporting import environment
from trencadis.assets import demo_path

START, ANSWER = 120.0, 60.0
"""Seconds in which the server must be ready, and answer."""

BODY = {
    "model": "demo", "stream": True, "max_tokens": 24, "temperature": 0,
    "messages": [{"role": "user", "content": "What do you see? Answer in a few words."}],
}  # fmt: skip


def unpack(wheels: Sequence[Path], folder: Path) -> dict[str, str]:
    """Unpacks ``wheels`` into ``folder``; returns the environment in which their packages are found."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as held:
            held.extractall(folder)
    found = environment()
    return {**found, "PYTHONPATH": f"{found['PYTHONPATH']}{os.pathsep}{folder}"}


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def wait_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: IO[bytes]) -> float:
    """Seconds until ``/ready`` answers.

    Raises:
        RuntimeError: it ended or took too long; with the last lines it said.
    """
    begun = time.perf_counter()
    while time.perf_counter() - begun < START and process.poll() is None:
        try:
            if client.get("/ready").status_code == 200:
                return time.perf_counter() - begun
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"serve did not become ready: {log.read()[-1500:].decode('utf-8', 'replace')}")


def chat(client: httpx.Client) -> dict[str, Any]:
    """Chunks and words of one streamed answer, and whether it ended as it should."""
    chunks, text, done = 0, "", False
    with client.stream("POST", "/v1/chat/completions", json=BODY, timeout=ANSWER) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                done = True
            elif data.startswith("{"):
                chunks += 1
                text += "".join(c["delta"].get("content") or "" for c in json.loads(data)["choices"])
    return {"chunks": chunks, "words": len(text.split()), "done": done}


def main() -> None:
    """Runs the command line and writes OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--policy", default="", help="a test policy of the device: twin")
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-P", "-m", "trencadis.server", "serve", str(demo_path()), "--device", args.device,
               "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo",
               "--kv-cache-memory-bytes", str(256 << 20), "--max-model-len", "1024"]  # fmt: skip
    command += ["--policy", args.policy] if args.policy else []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        env = unpack(args.wheels, Path(folder))
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=5) as client:
                ready = wait_ready(client, process, log)
                args.out.write_text(json.dumps(chat(client) | {"ready": ready}))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
