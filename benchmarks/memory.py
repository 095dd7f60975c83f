"""Memory of the server: ready, after 50 images, and its growth over 10,000 mixed requests.

python -m benchmarks.memory [--model DIR] [--requests N] [--repeats N] [--busy N] [--quick]

The KV cache is 256 MiB, the cache of decoded images 20 MiB. Growth is looked at once they and the rows of encoded
images have been written, and after a stretch in which allocators reach their sizes: before, memory grows with them.
Its slope is fitted by least squares to what is the processes' own: PSS moves by tens of MB as others that map torch's
libraries come and go.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.harness.compared_engines import words
from benchmarks.harness.loadgen import Load, drive
from benchmarks.harness.reporting import Others, report, table
from benchmarks.harness.server import Server, memory_of, serving

MB = 1e6
BARS = {"ready": 600.0, "after 50 images": 1200.0, "growth per 1,000": 1.0}
"""Most MB by figure."""
POOL = 256 << 20
FILL_WORDS, FILL_SIDE, FULL = 400, 448, 0.98
LIMIT = 7200.0
"""Longest load, in seconds."""
POINTS = 100
"""How often memory is read in a run."""
WARM = 10
"""One in so many of the requests comes first, unmeasured, to warm up."""
IMAGES = 5
"""One in so many requests has an image."""
WORDS, SIDES, OUT = (1, 30), (56, 168), (1, 4)
"""Least and most words, sides in pixels, and output tokens of a mixed request."""


@dataclass(frozen=True)
class Point:
    """MB after ``requests`` of them: of all processes, then of each kind; see ``memory_of``."""

    requests: int
    pss: float
    own: float
    api: float
    engine: float
    workers: float
    mapped: float


def read_memory(server: Server, requests: int = 0) -> Point:
    """Reads the memory of every process."""
    api, engine = server.process.pid, server.engine
    found = {pid: {k: v / MB for k, v in memory_of(pid).items()} for pid in server.pids()}

    def total(what: str, *pids: int) -> float:
        return sum(found[pid].get(what, 0.0) for pid in pids)

    rest = [pid for pid in found if pid not in (api, engine)]
    return Point(
        requests, total("pss", *found), total("own", *found),
        total("own", api), total("own", engine), total("own", *rest), total("mapped", *found),
    )  # fmt: skip


def run(server: Server, load: Load, **options: Any) -> dict[str, Any]:
    """Runs a load and returns its summary; raises if a request fails."""
    found = asyncio.run(drive(server.url, server.model(), load, **options))
    if found["errors"]:
        raise RuntimeError(f"{found['errors']} requests failed: {found['first_error']}")
    return found


def encoder_cache(server: Server) -> float:
    """Share of the rows for encoded images in use, from the metrics."""
    text = httpx.get(server.url + "/metrics", trust_env=False).text
    return float(re.findall(r"^vllm:encoder_cache_usage_perc\{.*\} (\S+)$", text, re.M)[0])


def fill(server: Server, most: int) -> int:
    """Sends different long prompts until the KV pool is full, then images until their rows are, at most ``most`` of
    each; returns how many requests it sent."""
    sent = 0
    while sent < most and read_memory(server).mapped * MB < POOL:
        run(server, Load(4, 16, words=FILL_WORDS, out=2, seed=1000 + sent, seconds=LIMIT))
        sent += 16
    images = 0
    while images < most and encoder_cache(server) < FULL:
        run(server, Load(4, 16, words=1, images=1, side=FILL_SIDE, out=1, seed=2000 + images, seconds=LIMIT))
        images += 16
    return sent + images


def mixed(model: str, load: Load, number: int) -> bytes:
    """A short prompt of any length, one in ``IMAGES`` with an image of any size, a short answer."""
    rng = random.Random((load.seed << 20) + number)
    parts: list[dict[str, Any]] = []
    if rng.randrange(IMAGES) == 0:
        grain = np.frombuffer(rng.randbytes(588), np.uint8).reshape(14, 14, 3)
        data = io.BytesIO()
        Image.fromarray(grain).resize((rng.randint(*SIDES), rng.randint(*SIDES))).save(data, "JPEG")
        url = "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    parts.append({"type": "text", "text": words(rng, rng.randint(*WORDS))})
    request = {
        "model": model, "messages": [{"role": "user", "content": parts}], "temperature": rng.choice((0, 0.8)),
        "max_tokens": rng.randint(*OUT), "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(request).encode()


def growth(server: Server, requests: int, seconds: float) -> tuple[list[Point], dict[str, Any]]:
    """``POINTS`` readings over ``requests`` of four clients, and the summary of the load."""
    load, points, every = Load(4, requests // WARM, seed=5000, seconds=LIMIT), list[Point](), max(1, requests // POINTS)
    run(server, load, make=mixed)

    def after(count: int) -> None:
        if count % every == 0:
            points.append(read_memory(server, count))

    found = run(server, replace(load, requests=requests, seed=5001, seconds=seconds), make=mixed, after=after)
    return points, found


def slope(requests: Sequence[float], values: Sequence[float]) -> float:
    """The slope by least squares, per 1,000 requests."""
    return float(np.polyfit(np.asarray(requests) / 1000, values, 1)[0])


def measure(flags: list[str], requests: int, seconds: float, full: bool) -> dict[str, Any]:
    """Measures a new server; all figures in MB. Sends fewer requests if ``seconds`` run out."""
    others = Others()
    with serving(*flags, "--kv-cache-memory-bytes", str(POOL), "--mm-processor-cache-gb", "0.02") as server:
        ready = read_memory(server).pss
        run(server, Load(2, 50, words=12, images=1, side=448, out=8, seed=1, seconds=LIMIT))
        images = read_memory(server).pss
        filled = fill(server, 400 if full else 16)
        written = read_memory(server).pss
        points, load = growth(server, requests, seconds)
    at = [p.requests for p in points]
    slopes = {part: slope(at, [getattr(p, part) for p in points]) for part in Point.__dataclass_fields__}
    figures = {"ready": ready, "after 50 images": images, "growth per 1,000": slopes["own"]}
    return {
        "figures": figures, "slopes": slopes, "written": written, "fill_requests": filled, "requests": load["requests"],
        "least": min(p.own for p in points), "most": max(p.own for p in points), "seconds": load["seconds"],
        "others_cores": others.cores(), "points": [asdict(p) for p in points],
    }  # fmt: skip


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs ``count`` processes that keep the processors busy."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spin:
            process.kill()
            process.wait()


def rows(found: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The rows of the table."""
    for name, value in found["figures"].items():
        yield name, value, BARS[name], "ok" if value < BARS[name] else "ABOVE"
    yield "KV cache written", found["written"], "", f"{found['fill_requests']} requests"
    parts = ", ".join(f"{k} {found['slopes'][k]:.2f}" for k in ("pss", "api", "engine", "workers"))
    yield "least and most", f"{found['least']:.0f}, {found['most']:.0f}", "", f"{found['requests']} requests; {parts}"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="checkpoint folder (default: the bundled demo)")
    parser.add_argument("--requests", type=int, default=10_000, help="requests over which growth is fitted")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="longest run")
    parser.add_argument("--repeats", type=int, default=1, help="runs, each with a new server")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the machine busy meanwhile")
    parser.add_argument("--name", default="memory", help="name of the result file")
    parser.add_argument("--quick", action="store_true", help="500 requests, and the pool is not filled")
    args = parser.parse_args()
    flags, requests = [args.model] if args.model else [], 500 if args.quick else args.requests
    with busy(args.busy):
        runs = [measure(flags, requests, args.seconds, not args.quick) for _ in range(args.repeats)]
    cells = [row for found in runs for row in rows(found)]
    others = max(found["others_cores"] for found in runs)
    result = {"quick": args.quick, "busy": args.busy, "others_cores": others, "runs": runs}
    report(args.name, result, table(("PSS", "MB", "bar", ""), cells))
    if any(r[3] == "ABOVE" for r in cells):
        sys.exit("memory is above its bar")


if __name__ == "__main__":
    main()
