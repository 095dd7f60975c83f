"""Memory of the server (PSS of all its processes): ready, after 50 images, and its growth over 1,000 requests.

python -m benchmarks.memory [--model DIR] [--quick]

The KV cache is 256 MiB, the cache of decoded pictures 20 MiB. Growth is looked at once both have been written:
before, memory grows with them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from typing import Any

import httpx

from benchmarks.common import Others, report, table
from benchmarks.loadgen import Load, drive
from benchmarks.server import Server, pss, serving

MB = 1e6
BARS = {"ready": 600.0, "after 50 images": 1200.0, "growth per 1,000": 1.0}
"""MB that are allowed."""
FILL_WORDS = 1800
LIMIT = 1800.0


def megabytes(server: Server) -> float:
    """PSS of the API process, the engine and anything else."""
    return sum(pss(pid) for pid in server.pids()) / MB


def kv_usage(server: Server) -> float:
    """Share of the KV pool in use by requests, from the metrics; for the log only."""
    for line in httpx.get(server.url + "/metrics", trust_env=False).text.splitlines():
        if "kv_cache_usage" in line and not line.startswith("#"):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def run(server: Server, load: Load) -> None:
    """A load that may not fail."""
    found = asyncio.run(drive(server.url, server.model(), load))
    if found["errors"]:
        raise RuntimeError(f"{found['errors']} requests failed: {found['first_error']}")


def fill(server: Server, most: int) -> int:
    """Long prompts, none like another, until ``most`` were sent or memory has stopped growing; how many were sent."""
    sent, last = 0, megabytes(server)
    while sent < most:
        run(server, Load(4, 16, words=FILL_WORDS, out=2, seed=1000 + sent, seconds=LIMIT))
        sent += 16
        now = megabytes(server)
        if sent >= 64 and now - last < 0.2:
            break
        last = now
    return sent


def growth(server: Server, requests: int) -> list[float]:
    """MB after each tenth of ``requests``, a third of them with an image."""
    points = [megabytes(server)]
    part = max(1, requests // 30)
    for tenth in range(10):
        mixed = Load(4, part, words=60, images=1, side=224, out=8, seed=5000 + 2 * tenth, seconds=LIMIT)
        run(server, mixed)
        run(server, replace(mixed, images=0, requests=2 * part, seed=mixed.seed + 1))
        points.append(megabytes(server))
    return points


def slope(points: list[float], requests: int) -> float:
    """MB per 1,000 requests: least squares over equally spaced points."""
    n = len(points)
    middle, mean = (n - 1) / 2, sum(points) / n
    rise = sum((i - middle) * (p - mean) for i, p in enumerate(points))
    spread = sum((i - middle) ** 2 for i in range(n))
    return rise / spread * (n - 1) / requests * 1000


def measure(flags: list[str], quick: bool) -> dict[str, Any]:
    """All figures in MB."""
    with serving(*flags, "--kv-cache-memory-bytes", "256MiB", "--mm-processor-cache-gb", "0.02") as server:
        ready = megabytes(server)
        run(server, Load(2, 50, words=12, images=1, side=448, out=8, seed=1, seconds=LIMIT))
        images = megabytes(server)
        filled = fill(server, 32 if quick else 400)
        full = megabytes(server)
        # A first stretch lets allocators and caches reach their sizes.
        requests = 90 if quick else 990
        growth(server, requests // 3)
        points = growth(server, requests)
        parts = {str(pid): round(pss(pid) / MB, 1) for pid in server.pids()}
    figures = {"ready": ready, "after 50 images": images, "growth per 1,000": slope(points, requests)}
    return {"figures": figures, "full_cache": full, "fill_requests": filled, "points": points, "processes": parts}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="checkpoint folder (default: the bundled demo)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    args = parser.parse_args()
    others = Others()
    found = measure([args.model] if args.model else [], args.quick)
    rows = [(k, v, BARS[k], "ok" if v < BARS[k] else "ABOVE") for k, v in found["figures"].items()]
    rows.append(("KV cache written", found["full_cache"], "", f"{found['fill_requests']} long prompts"))
    text = table(("PSS", "MB", "bar", ""), rows)
    report("memory", {**found, "quick": args.quick, "others_cores": others.cores()}, text)
    if any(r[3] == "ABOVE" for r in rows):
        sys.exit("memory is above its bar")


if __name__ == "__main__":
    main()
