"""``trencadis bench``: runs the benchmark that is named."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from trencadis.core.errors import StartupError

USAGE = """\
usage: trencadis bench serve [--base-url URL] ...    load on a running server: TTFT, TPOT, ITL, E2EL, goodput
       trencadis bench throughput [--model M] ...    an engine in this process, all requests at once
       trencadis bench latency [--model M] ...       an engine in this process, one batch again and again
       trencadis bench startup [--model M] ...       seconds from nothing to an engine that answers
Flags and JSON results have vLLM's names; COMMAND --help lists them.
"""
BENCHMARKS = {
    "serve": "trencadis.server.bench.bench_serve",
    "throughput": "trencadis.server.bench.throughput",
    "latency": "trencadis.server.bench.latency",
    "startup": "trencadis.server.bench.startup",
}


def main(words: Sequence[str]) -> int:
    """Runs a benchmark; returns the exit code.

    Raises:
        StartupError: one line about what is wrong.
    """
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if name else 2
    if name not in BENCHMARKS:
        raise StartupError(f"bench does not know {name[:40]}; known are {', '.join(BENCHMARKS)}.")
    return int(import_module(BENCHMARKS[name]).main(words[1:]))
