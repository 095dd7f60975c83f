"""How far ``--api-server-count`` scales: a real server, an engine that computes nothing, clients in other processes.

python -m benchmarks.host.api_processes [--counts 1,2] [--clients 256] [--tokens 100] [--pace 5] [--repeats 3]

The engine sends every client one token each ``--pace`` milliseconds, more than one API process can write. Counts take
turns. The bar is 1.8 times the tokens a second with two processes, on 4 cores or more; with fewer, clients, engine and
API processes share them, and the ratio says nothing. What holds there too is the CPU of each role for a token: the
front's bounds how many API processes it can feed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from benchmarks.harness.reporting import ROOT, report, table
from benchmarks.host.stream import Clients, serving
from trencadis.core.cpu_affinity import available_cpus
from trencadis.server.metrics.process_tenant_and_sleep_collectors import ProcessesCollector

HEADER = ("API processes", "tokens/s", "us a token: front", "all API", "engine")
CORES, BAR = 4, 1.8
CLIENT_PROCESSES = 2


def streams(port: int, count: int, tokens: int) -> tuple[float, float, int]:
    """When ``count`` streams began and ended, and their tokens."""

    async def run() -> tuple[float, float, int]:
        clients = Clients(port, count, tokens)
        begun = time.monotonic()
        await asyncio.gather(*(clients.one() for _ in range(count)))
        return begun, time.monotonic(), clients.tokens

    return asyncio.run(run())


def seconds_of(pid: int) -> dict[str, float]:
    """CPU seconds by role of a server's processes; all API processes together are ``api``."""
    found: dict[str, float] = defaultdict(float)
    for use in ProcessesCollector(pid, role="root").read().values():
        found["api" if use.role.startswith("api") else use.role] += use.seconds
    return found


def measure(model: str, count: int, clients: int, tokens: int, pace: float) -> dict[str, float]:
    """Starts a server, streams, stops it."""
    with serving(model, clients, pace, ["--api-server-count", str(count)]) as (port, pid):
        with ProcessPoolExecutor(CLIENT_PROCESSES, get_context("spawn")) as pool:
            list(pool.map(streams, [port] * CLIENT_PROCESSES, [4] * CLIENT_PROCESSES, [8] * CLIENT_PROCESSES))
            before, share = seconds_of(pid), clients // CLIENT_PROCESSES
            done = list(pool.map(streams, *zip(*[(port, share, tokens)] * CLIENT_PROCESSES, strict=True)))
        used, made = seconds_of(pid), sum(tokens for _, _, tokens in done)
        cost = {role: 1e6 * (used[role] - before[role]) / made for role in ("root", "api", "engine")}
        front, api = (0.0, cost["root"]) if count == 1 else (cost["root"], cost["api"])
        wall = max(end for _, end, _ in done) - min(begun for begun, _, _ in done)
        return {"rate": made / wall, "front": front, "api": api, "engine": cost["engine"]}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"))
    parser.add_argument("--counts", default="1,2")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--pace", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    counts = [int(part) for part in args.counts.split(",")]
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for _ in range(args.repeats):
        for count in counts:
            runs[count].append(measure(args.model, count, args.clients, args.tokens, args.pace))
    middle: dict[int, dict[str, float]] = {
        count: {name: statistics.median(run[name] for run in some) for name in some[0]} for count, some in runs.items()
    }
    rows: list[tuple[Any, ...]] = [
        (count, round(m["rate"]), round(m["front"], 1), round(m["api"], 1), round(m["engine"], 1))
        for count, m in middle.items()
    ]
    report("host_api_processes", {"settings": vars(args), "runs": runs}, table(HEADER, rows))
    ratio = middle[counts[-1]]["rate"] / middle[counts[0]]["rate"]
    cores = available_cpus()
    verdict = f"unproven: {cores} cores, it takes {CORES}" if cores < CORES else f"bar {BAR} for two"
    print(f"{counts[-1]} API processes answer {ratio:.2f} times as much as {counts[0]} ({verdict})")


if __name__ == "__main__":
    main()
