"""CPU of the API process for a streamed token: a real server, clients on sockets, an engine that computes nothing.

python -m benchmarks.host.stream [--kinds chat,logprobs] [--clients 256] [--tokens 200] [--pace 20] [--repeats 3]
    [--model assets/demo] [--lag]

The engine sends every client one token each ``--pace`` milliseconds. CPU seconds are the server process's own, from the
moment when all clients stream until the first has ended, divided by the tokens that arrive in that time. ``--lag``
measures how late the timers of its event loop come meanwhile, and when all clients of a second round disconnect at
once; the probe costs CPU itself.
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
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.reporting import ROOT, environment, report, table
from benchmarks.host.stream_kinds import KINDS, Kind
from trencadis.core.engine_config import EngineConfig
from trencadis.core.process.engine_messages import EngineInfo, EngineStats
from trencadis.core.request import Delta, Request, TokenLogprob
from trencadis.core.startup_progress_and_warmup_pacing import Progress

HEADER = ("kind", "clients", "tokens", "us a token", "of it system", "tokens/s", "lag ms p99", "gone: most")


class PacedEngine:
    """One token for every request at each tick, all in one message."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.top: dict[str, int] = {}
        """Of requests that want log-probabilities, how many candidates."""
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
        if request.params.logprobs is not None:
            self.top[request.id] = request.params.logprobs

    def abort(self, id: str, choice: int = -1) -> None:
        """Forgets a request."""
        self.left.pop(id, None)
        self.top.pop(id, None)

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
            token = random.randrange(300, 1000)
            delta = Delta(id, 0, [token], finish=None if left > 1 else "length")
            if id in self.top:
                top = self.top[id]
                delta.logprobs = [TokenLogprob(token, -1.25, 1, [token + i for i in range(top)], [-1.25] * top)]
            out.append(delta)
            self.left[id] = left - 1
            if left <= 1:
                self.abort(id)
        return out

    def stats(self) -> EngineStats:
        """Counters."""
        return EngineStats(running=len(self.left))


def cpu_of(pid: int) -> tuple[float, float]:
    """CPU seconds of a process: user, system."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


class Clients:
    """Streams over plain sockets; events are counted, not parsed."""

    def __init__(self, port: int, count: int, tokens: int, kind: Kind = KINDS["chat"]) -> None:
        self.port, self.count = port, count
        self.tokens = self.begun = self.ended = 0
        self.changed = asyncio.Event()
        self.refusal = b""
        self.mark, self.request = kind.mark, kind.request(tokens)

    async def one(self) -> None:
        """One stream to its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.request)
        try:
            await self.read(reader)
        finally:
            writer.close()

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Reads a stream to its end."""
        first, end = True, b"0\r\n\r\n"
        while data := await reader.read(1 << 16):
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                self.refusal = data[:400]
                self.changed.set()
            self.tokens += data.count(self.mark)
            if first and self.mark in data:
                first = False
                self.begun += 1
                self.changed.set()
            if data.endswith(end):
                break
        self.ended += 1
        self.changed.set()

    async def reach(self, done: Any) -> None:
        """Waits until ``done()``."""
        while not done():
            self.changed.clear()
            await self.changed.wait()
            if self.refusal:
                raise RuntimeError(f"the server refuses a request: {self.refusal!r}")

    async def measure(self, pid: int) -> dict[str, float]:
        """Runs all streams; the CPU time of ``pid`` counts while all of them run."""
        tasks = [asyncio.create_task(self.one()) for _ in range(self.count)]
        await self.reach(lambda: self.begun == self.count)
        await asyncio.sleep(0.3)
        lag_of(self.port)
        begin, (user, system), tokens = time.monotonic(), cpu_of(pid), self.tokens
        await self.reach(lambda: self.ended > 0)
        seconds, used, made = time.monotonic() - begin, cpu_of(pid), self.tokens - tokens
        late = lag_of(self.port)
        await asyncio.gather(*tasks)
        if not made:
            raise RuntimeError("the first stream ended before all had begun: ask for more --tokens")
        user, system = 1e6 * (used[0] - user) / made, 1e6 * (used[1] - system) / made
        return {"us": user + system, "system": system, "rate": made / seconds, "tokens": made, "lag": high(late)}

    async def disconnect(self) -> dict[str, float]:
        """Runs all streams for half a second, then ends all connections in one go."""
        tasks = [asyncio.create_task(self.one()) for _ in range(self.count)]
        await self.reach(lambda: self.begun == self.count)
        await asyncio.sleep(0.5)
        lag_of(self.port)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.5)
        late = lag_of(self.port)
        return {"gone": max(late, default=0.0)}


def lag_of(port: int) -> list[float]:
    """Milliseconds by which timers of the server's event loop came late since the last call; none without the probe."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/lag", timeout=10) as answer:
            return [1e3 * late for late in json.load(answer)]
    except urllib.error.HTTPError:
        return []


def high(late: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(late)[int(0.99 * len(late))] if late else 0.0


@contextmanager
def serving(model: str, clients: int, pace: float, flags: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """A running server: its port and process. Its log is read to the end, else it would wait for the reader."""
    command = [sys.executable, "-P", "-m", "trencadis.server", "--host", "127.0.0.1", "--port", "0", "--model", model]
    command += ["--engine", "benchmarks.host.stream:PacedEngine.create", "--served-model-name", "m"]
    command += ["--max-num-queued-reqs", str(2 * clients), *flags]
    server = subprocess.Popen(command, env=environment() | {"PACE": str(pace)}, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    reader = threading.Thread(target=server.stderr.read)
    try:
        port, lines = 0, []
        for line in server.stderr:
            lines.append(line)
            found = re.search(r"Uvicorn running on http://127\.0\.0\.1:(\d+)", line)
            if found:
                port = int(found[1])
                break
        assert port, "".join(lines)
        reader.start()
        yield port, server.pid
    finally:
        server.terminate()
        server.wait(30)
        reader.join()
        server.stderr.close()


def measure(
    model: str, clients: int, tokens: int, pace: float, kind: str = "chat", lag: bool = False
) -> dict[str, Any]:
    """Starts a server, streams, stops it."""
    requested = KINDS[kind]
    flags = [*requested.flags, *(["--app", "benchmarks.host.event_loop_lag:probed"] if lag else [])]

    async def run(port: int, pid: int) -> dict[str, Any]:
        found: dict[str, Any] = await Clients(port, clients, tokens, requested).measure(pid)
        if lag:
            found |= await Clients(port, clients, tokens, requested).disconnect()
        return found

    with serving(model, clients, pace, flags) as (port, pid):
        return asyncio.run(run(port, pid))


def row(kind: str, clients: int, run: dict[str, Any], lag: bool) -> tuple[Any, ...]:
    """A row of the table."""
    late = [round(run[name], 1) for name in ("lag", "gone")] if lag else ["", ""]
    return kind, clients, int(run["tokens"]), round(run["us"], 1), round(run["system"], 1), round(run["rate"]), *late


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default="chat")
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"))
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pace", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lag", action="store_true")
    args = parser.parse_args()
    kinds = list(KINDS) if args.kinds == "all" else args.kinds.split(",")
    runs = [
        (kind, measure(args.model, args.clients, args.tokens, args.pace, kind, args.lag))
        for _ in range(args.repeats)
        for kind in kinds
    ]
    rows = [row(kind, args.clients, run, args.lag) for kind, run in runs]
    report("host_stream", {"settings": vars(args), "runs": runs}, table(HEADER, rows))


if __name__ == "__main__":
    main()
