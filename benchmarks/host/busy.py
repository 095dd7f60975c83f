"""Measures what a busy neighbour costs a CPU server: all threads beside ``--threads 1``, free and with one core taken.

python -m benchmarks.host.busy [--model DIR] [--clients 1,8] [--repeats 3] [--out 64] [--seconds 3]
                              [--other PYTHON]

Both servers stand at once and take turns, so that each pair of rates saw the same machine. The neighbour is a process
that spins on the last of this process's cores. ``after`` begins two seconds after its end. ``--other``: the Python of
another checkout, whose server is a third side.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.harness.loadgen import Load, drive
from benchmarks.harness.reporting import ROOT, report, table
from benchmarks.harness.server import Server, serving

STATES = ("free", "busy", "after")
REST = 2.0
"""Seconds between the neighbour's end and the first request."""
HEADER = ("clients", "machine", "side", "tokens/s", "of one thread", "of the same, free")
BESIDE_ONE, AFTER = 0.9, 0.95


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """A process that spins on ``core``, for the block's time."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(1)
        yield
    finally:
        process.kill()
        process.wait()


def rate(server: Server, clients: int, requests: int, out: int, seed: int) -> float:
    """Tokens a second of so many requests a client."""
    load = Load(clients, requests * clients, words=40, out=out, seed=seed)
    found = asyncio.run(drive(server.url, server.model(), load))
    if found["errors"]:
        raise SystemExit(f"a request failed: {found['first_error']}")
    return float(found["tokens_per_second"])


def measure(
    servers: dict[str, Server], clients: int, out: int, repeats: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """State of the machine -> side -> rates. ``after`` is of the side with all threads alone."""
    warm = min(rate(server, clients, 2, out, 999) for server in servers.values())
    size = max(round(warm * seconds / out / clients), 2), out
    rates: dict[str, dict[str, list[float]]] = {state: {side: [] for side in servers} for state in STATES}
    core = max(os.sched_getaffinity(0))
    for number in range(repeats):
        order = list(servers) if number % 2 else list(servers)[::-1]
        for side in order:
            rates["free"][side].append(rate(servers[side], clients, *size, number))
        with neighbour(core):
            for side in order:
                rates["busy"][side].append(rate(servers[side], clients, *size, 100 + number))
            rate(servers["all threads"], clients, *size, 200 + number)
        time.sleep(REST)
        rates["after"]["all threads"].append(rate(servers["all threads"], clients, *size, 300 + number))
    return rates


def rows_of(clients: int, rates: dict[str, dict[str, list[float]]]) -> list[tuple[Any, ...]]:
    """Medians, and medians of the ratios of runs that took turns."""

    def ratio(above: list[float], below: list[float]) -> float | str:
        return statistics.median(a / b for a, b in zip(above, below, strict=True)) if above and below else ""

    return [
        (clients, state, side, statistics.median(found), ratio(found, rates[state]["one thread"]),
         ratio(found, rates["free"][side]))
        for state in STATES for side, found in rates[state].items() if found
    ]  # fmt: skip


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"))
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run, about")
    parser.add_argument("--other", default="", help="the Python of another checkout, for a third side")
    args = parser.parse_args()
    flags = ["--model", args.model, "--device", "cpu"]
    rows, raw = [], {}
    with ExitStack() as stack:
        servers = {"all threads": stack.enter_context(serving(*flags))}
        servers["one thread"] = stack.enter_context(serving(*flags, "--threads", "1"))
        if args.other:
            command = ["env", "-u", "PYTHONPATH", args.other, "-P", "-m", "trencadis.server"]
            servers["other checkout"] = stack.enter_context(serving(*flags, command=command))
        for clients in (int(part) for part in args.clients.split(",")):
            raw[clients] = measure(servers, clients, args.out, args.repeats, args.seconds)
            rows += rows_of(clients, raw[clients])
    bars = f"Bars: all threads, busy, at least {BESIDE_ONE} of one thread; after, at least {AFTER} of free."
    report("busy", {"rates": raw, "rows": rows}, table(HEADER, rows) + "\n" + bars)


if __name__ == "__main__":
    main()
