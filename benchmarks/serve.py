"""Our server under load: time to first token, time per token, gaps, tokens and images per second.

python -P -m benchmarks.serve [--model DIR] [--clients 1,8,32] [--quick]

The server runs as a process on the loopback and is ended afterwards. Clients are a closed loop, so at the start they
all ask at once: the first token then waits for the prompts of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from benchmarks.common import Others, report, table
from benchmarks.loadgen import Load, drive
from benchmarks.server import Server, serving

COLUMNS = {
    "clients": "c", "requests": "requests", "errors": "errors", "prompt_tokens": "prompt", "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "p99", "tpot_p50_ms": "TPOT p50 ms", "itl_p50_ms": "ITL p50 ms", "itl_p99_ms": "p99 ",
    "tokens_per_second": "tokens/s", "images_per_second": "images/s",
}  # fmt: skip


def loads(clients: list[int], quick: bool, side: int) -> list[tuple[str, Load]]:
    """Text and image loads of each concurrency; every client asks at least twice, but for ``quick``."""
    made = []
    for c in clients:
        count = c if quick else max(2 * c, 8)
        made.append(("text", Load(c, count, words=100, out=64, seed=c)))
        made.append(("image", Load(c, count, words=12, images=1, side=side, out=32, seed=c + 1)))
    return made


def measure(server: Server, kind: str, load: Load) -> dict[str, Any]:
    """One load against the server."""
    others = Others()
    found = asyncio.run(drive(server.url, server.model(), load))
    return {"kind": kind, **found, "others_cores": others.cores()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="checkpoint folder (default: the bundled demo)")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--side", type=int, default=448, help="pixels of an image's side")
    parser.add_argument("--quick", action="store_true", help="one request a client")
    args = parser.parse_args()
    others, found = Others(), []
    flags = [args.model] if args.model else []
    with serving(*flags, "--kv-cache-memory-bytes", "1GiB") as server:
        for warm in (Load(1, 2, out=4), Load(1, 2, images=1, side=args.side, out=4, seed=3)):
            asyncio.run(drive(server.url, server.model(), warm))
        for kind, load in loads([int(c) for c in args.clients.split(",")], args.quick, args.side):
            found.append(measure(server, kind, load))
            print(found[-1], file=sys.stderr, flush=True)
    text = table(("load", *COLUMNS.values()), ([f["kind"], *(f[k] for k in COLUMNS)] for f in found))
    settings = {"model": args.model or "demo", "quick": args.quick, "side": args.side}
    report("serve", {"settings": settings, "loads": found, "others_cores": others.cores()}, text)
    if any(f["errors"] for f in found):
        sys.exit("some requests failed")


if __name__ == "__main__":
    main()
