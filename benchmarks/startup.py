"""Seconds from starting the server process to a 200 from ``/ready``, beside ``python -c "import torch"``.

python -m benchmarks.startup [--model DIR] [--repeats 5]

The two take turns. The server serves the bundled demo; it may not import transformers in either process, nor torch in
the API process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

from benchmarks.harness.reporting import Others, environment, median, report, table
from benchmarks.harness.server import Server, imported


def import_torch() -> float:
    """Seconds that a process takes to import torch and end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", "import torch"], check=True, env=environment())
    return time.perf_counter() - start


def start_server(flags: list[str]) -> tuple[float, dict[str, dict[str, bool]]]:
    """Seconds until the server is ready, and what each of its processes has imported."""
    server = Server(flags)
    try:
        seconds = server.wait_ready()
        return seconds, {"api": imported(server.process.pid), "engine": imported(server.engine)}
    finally:
        server.stop()


def violations(seen: dict[str, dict[str, bool]]) -> list[str]:
    """Which processes import what they must not."""
    found = [f"{process} imports transformers" for process in seen if seen[process]["transformers"]]
    return found + (["api imports torch"] if seen["api"]["torch"] else [])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="checkpoint folder (default: the bundled demo)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    args = parser.parse_args()
    others = Others()
    torch_seconds: list[float] = []
    ready: list[float] = []
    wrong: list[str] = []
    import_torch()  # warm-up: the first import reads from the disk
    start_server([args.model] if args.model else [])
    for _ in range(1 if args.quick else args.repeats):
        torch_seconds.append(import_torch())
        seconds, seen = start_server([args.model] if args.model else [])
        ready.append(seconds)
        wrong += violations(seen)
    middle: dict[str, Any] = {"ready": median(ready), "import_torch": median(torch_seconds)}
    rows = [
        ("server ready", middle["ready"], min(ready), max(ready)),
        ("import torch", middle["import_torch"], min(torch_seconds), max(torch_seconds)),
        ("beyond torch", middle["ready"] - middle["import_torch"], "", ""),
    ]
    text = table(("seconds", "median", "least", "most"), rows)
    text += "\n\nImports: " + (", ".join(sorted(set(wrong))) or "no transformers anywhere, no torch in the API process")
    result = {"median": middle, "ready": ready, "import_torch": torch_seconds, "wrong_imports": sorted(set(wrong))}
    report("startup", {**result, "others_cores": others.cores()}, text)
    if wrong:
        sys.exit("a process imports what it must not")


if __name__ == "__main__":
    main()
