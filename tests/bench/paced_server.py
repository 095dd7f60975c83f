"""A server that answers by the clock: ``python -m tests.bench.paced_server --port 8123 [--ttft 0.1] [--itl 0.01]``.

Token ``i`` of a stream is written ``ttft + i * itl`` seconds after its request arrived, each in a piece of its own, so
what a client should measure is known. It knows no HTTP beyond what such clients send, so that it costs little itself.
Beside the routes that generate it has ``/v1/models``, ``/health``, ``/tokenize`` and ``/detokenize`` (a token is a
word), and ``/served``: how often each prompt was answered, and when tokens were written in truth, since a machine with
other work keeps no clock.

A prompt that holds ``status:429`` gets that status once for each of its lines, ``always:500`` at every time, ``cut`` a
connection that ends in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

ROOT = str(Path(__file__).resolve().parents[2])

HEAD = "HTTP/1.1 {status} Paced\r\ncontent-type: {kind}\r\nx-request-id: paced-{number}\r\n{more}\r\n"
STREAMS: list[tuple[float, float]] = []
"""Of each stream: seconds from its request to its first and to its last token, as they were written."""


class PacedServer(asyncio.Protocol):
    """One connection; ``served`` and ``tripped`` are shared by all."""

    ids = itertools.count()
    served: ClassVar[Counter[str]] = Counter()
    tripped: ClassVar[set[str]] = set()

    def __init__(self, ttft: float, itl: float) -> None:
        self.ttft, self.itl = ttft, itl
        self.data = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        while b"\r\n\r\n" in self.data:
            head, rest = self.data.split(b"\r\n\r\n", 1)
            found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            size = int(found[1]) if found else 0
            if len(rest) < size:
                return
            self.data = rest[size:]
            path = head.split(b" ", 2)[1].decode()
            self.request(path, json.loads(rest[:size]) if size else {}, time.perf_counter())

    def request(self, path: str, body: dict[str, Any], came: float) -> None:
        """Answers one request."""
        prompt = json.dumps(body.get("messages") or body.get("prompt") or body.get("input") or "")
        trip = re.search(r"(status|always):(\d+)", prompt)
        if trip and path != "/tokenize" and (trip[1] == "always" or prompt not in self.tripped):
            self.tripped.add(prompt)
            self.whole({"error": {"message": "as told", "type": "Told", "code": int(trip[2])}}, int(trip[2]))
        elif path == "/v1/models":
            self.whole({"data": [{"id": "paced", "root": "paced"}]})
        elif path == "/served":
            self.whole({"served": self.served, "streams": STREAMS})
        elif path == "/tokenize":
            self.whole({"tokens": [len(w) for w in body["prompt"].split()], "count": len(body["prompt"].split())})
        elif path == "/detokenize":
            self.whole({"prompt": " ".join("x" * t for t in body["tokens"])})
        elif path.endswith("completions") and body.get("stream"):
            self.served[prompt] += 1
            asyncio.get_running_loop().create_task(self.stream(path, body, came, prompt))
        elif path == "/health":
            self.whole({})
        else:
            self.served[prompt] += 1
            asyncio.get_running_loop().call_later(self.ttft, self.whole, {"path": path, "prompt": prompt})

    def whole(self, content: Any, status: int = 200) -> None:
        """Writes a JSON answer."""
        data = json.dumps(content).encode()
        more = f"content-length: {len(data)}\r\n" + ("retry-after: 0\r\n" if status == 429 else "")
        head = HEAD.format(status=status, kind="application/json", number=next(self.ids), more=more)
        self.transport.write(head.encode() + data)

    async def stream(self, path: str, body: dict[str, Any], came: float, prompt: str) -> None:
        """Writes a stream of one token a piece, and the usage."""
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        head = HEAD.format(
            status=200, kind="text/event-stream", number=next(self.ids), more="transfer-encoding: chunked\r\n"
        )
        first = 0.0
        for i in range(count):
            due = came + self.ttft + i * self.itl
            await asyncio.sleep(due - time.perf_counter())
            first = first or time.perf_counter() - came
            delta = {"delta": {"content": "x "}} if path.startswith("/v1/chat") else {"text": "x "}
            self.transport.write((head.encode() if i == 0 else b"") + event({"choices": [{"index": 0, **delta}]}))
            if "cut" in prompt and i == count // 2:
                self.transport.close()
                return
        STREAMS.append((first, time.perf_counter() - came))
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count}
        self.transport.write(event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def event(content: Any) -> bytes:
    """A server-sent event as a chunk of its own."""
    return chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    """``data`` in HTTP's chunked form."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@contextlib.contextmanager
def paced(ttft: float = 0.0, itl: float = 0.0) -> Iterator[str]:
    """The base URL of such a server in a process of its own, which ends afterwards."""
    command = [sys.executable, "-P", "-m", "tests.bench.paced_server", "--ttft", str(ttft), "--itl", str(itl)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT}
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


async def serve(port: int, ttft: float, itl: float) -> None:
    """Serves until SIGTERM."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, done.set)
    server = await loop.create_server(lambda: PacedServer(ttft, itl), "127.0.0.1", port, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await done.wait()


def main() -> None:
    """Reads the command line; prints the port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.0)
    parser.add_argument("--itl", type=float, default=0.0)
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.ttft, given.itl))


if __name__ == "__main__":
    main()
