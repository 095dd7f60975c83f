"""CPU of the API process for a streamed token: a real server, clients on sockets, an engine that computes nothing.

python -m benchmarks.host.stream [--clients 256] [--tokens 200] [--pace 20] [--repeats 3] [--model assets/demo]

The engine sends every client one token each ``--pace`` milliseconds. CPU seconds are the server process's own, from the
moment when all clients stream until the first has ended, divided by the tokens that arrive in that time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from typing import Any

from benchmarks.harness.common import ROOT, environment, report, table
from trencadis.core.config import EngineConfig
from trencadis.core.process.wire import EngineInfo, EngineStats
from trencadis.core.progress import Progress
from trencadis.core.request import Delta, Request

HEADER = ("clients", "tokens", "us a token", "tokens/s")


class PacedEngine:
    """One token for every request at each tick, all in one message."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.pace = float(os.environ["PACE"]) / 1000
        self.next = 0.0

    @classmethod
    def create(cls, config: EngineConfig, progress: Progress) -> PacedEngine:
        """The factory."""
        return cls()

    def info(self) -> EngineInfo:
        """Sizes so large that every request is admitted."""
        return EngineInfo("paced", "float32", 4096, 16, 1 << 20, 1024, 0)

    def add(self, request: Request) -> None:
        """Takes a request."""
        self.left[request.id] = request.params.max_tokens or 1

    def abort(self, id: str, choice: int = -1) -> None:
        """Forgets a request."""
        self.left.pop(id, None)

    def busy(self) -> bool:
        """Whether anything streams."""
        return bool(self.left)

    def needs(self) -> list[Any]:
        """No pixels."""
        return []

    def step(self) -> list[Delta]:
        """Waits for the tick; one token each."""
        time.sleep(max(0.0, self.next - time.monotonic()))
        self.next = max(self.next, time.monotonic() - self.pace) + self.pace
        out = []
        for id, left in list(self.left.items()):
            out.append(Delta(id, 0, [random.randrange(300, 1000)], finish=None if left > 1 else "length"))
            self.left[id] = left - 1
            if left <= 1:
                del self.left[id]
        return out

    def stats(self) -> EngineStats:
        """Counters."""
        return EngineStats(running=len(self.left))


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, user and system."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Clients:
    """Streams over plain sockets; events are counted, not parsed."""

    def __init__(self, port: int, count: int, tokens: int) -> None:
        self.port, self.count = port, count
        self.tokens = self.begun = self.ended = 0
        self.changed = asyncio.Event()
        asked = {"model": "m", "stream": True, "max_tokens": tokens, "ignore_eos": True}
        body = json.dumps(asked | {"messages": [{"role": "user", "content": "Hi"}]}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        self.request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body

    async def one(self) -> None:
        """One stream to its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.request)
        first = True
        while data := await reader.read(1 << 16):
            self.tokens += data.count(b'"content":"')
            if first and b'"content":"' in data:
                first = False
                self.begun += 1
                self.changed.set()
            if b"[DONE]" in data:
                break
        self.ended += 1
        self.changed.set()
        writer.close()

    async def reach(self, done: Any) -> None:
        """Waits until ``done()``."""
        while not done():
            self.changed.clear()
            await self.changed.wait()

    async def measure(self, pid: int) -> dict[str, float]:
        """Runs all streams; the CPU time of ``pid`` counts while all of them run."""
        tasks = [asyncio.create_task(self.one()) for _ in range(self.count)]
        await self.reach(lambda: self.begun == self.count)
        await asyncio.sleep(0.3)
        begin, cpu, tokens = time.monotonic(), cpu_of(pid), self.tokens
        await self.reach(lambda: self.ended > 0)
        seconds, used, made = time.monotonic() - begin, cpu_of(pid) - cpu, self.tokens - tokens
        await asyncio.gather(*tasks)
        return {"us": 1e6 * used / made, "rate": made / seconds, "tokens": made}


def measure(model: str, clients: int, tokens: int, pace: float) -> dict[str, float]:
    """Starts a server, streams, stops it."""
    command = [sys.executable, "-P", "-m", "trencadis.server", "--host", "127.0.0.1", "--port", "0", "--model", model]
    command += ["--engine", "benchmarks.host.stream:PacedEngine.create", "--served-model-name", "m"]
    command += ["--max-num-queued-reqs", str(2 * clients)]
    server = subprocess.Popen(command, env=environment() | {"PACE": str(pace)}, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        port, lines = 0, []
        for line in server.stderr:
            lines.append(line)
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
            port = int(found[1]) if found else port
            if "engine ready" in line:
                break
        assert port, "".join(lines)
        return asyncio.run(Clients(port, clients, tokens).measure(server.pid))
    finally:
        server.terminate()
        server.stderr.close()
        server.wait(30)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"))
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pace", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    runs = [measure(args.model, args.clients, args.tokens, args.pace) for _ in range(args.repeats)]
    rows = [(args.clients, int(r["tokens"]), round(r["us"], 1), round(r["rate"])) for r in runs]
    report("host_stream", {"settings": vars(args), "runs": runs}, table(HEADER, rows))


if __name__ == "__main__":
    main()
