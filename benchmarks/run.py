"""All benchmarks, each in a process of its own: ``make bench``, or ``python benchmarks/run.py [--only engine,memory]``.

Results are written to ``.bench/results/NAME.json``; docs/benchmarks.md says what they mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("startup", "memory", "engine", "serve", "media", "again")
ELSEWHERE = {"again": "harness.repeated_question"}
"""Names whose module has another one."""


def module(name: str) -> str:
    """The module that runs benchmark ``name``."""
    return f"benchmarks.{ELSEWHERE.get(name, name)}"


def run(name: str, quick: bool) -> int:
    """Runs one benchmark and returns its exit code."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-P", "-m", module(name), *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


def main() -> int:
    """Runs the command line; 1 if a benchmark fails or misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(NAMES), help="benchmarks to run, comma-separated")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and requests")
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(NAMES)}")
    codes = {name: run(name, args.quick) for name in names}
    for name in names:
        path = ROOT / ".bench" / "results" / f"{name}.json"
        if path.is_file():
            print(f"\n{name}\n\n{json.loads(path.read_text())['table']}")
    failed = [name for name, code in codes.items() if code]
    if failed:
        print(f"\nfailed or missed a bar: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
