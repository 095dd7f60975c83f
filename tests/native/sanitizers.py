"""Builds the kernels with sanitizers, and runs their tests and a seeded fuzz.

python -m tests.native.sanitizers [--cases 500] [--seed 1] [--compiler gcc] [--only address|thread|tests|warnings]

address: out of bounds, leaks and undefined behaviour. thread: races. tests: the kernels' own tests, on a library that
finds the first. warnings: none, by -Wall -Wextra. The first that finds anything ends the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "backends" / "cpu" / "native"
FLAGS = ("-std=c11", "-ffp-contract=off", "-fPIC", "-g", "-fno-omit-frame-pointer", f"-I{SOURCES}")
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wmissing-prototypes", "-Werror")
KINDS = {
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-fsanitize=thread"),
}
"""-O0 where what is found does not depend on it: instrumented kernels take minutes to optimise."""

TESTS = ("tests/ops/test_turn.py", "tests/host/test_best_head.py", "tests/host/test_packing.py", "tests/quant/test_native.py",
         "tests/host/test_decode_attention.py")  # fmt: skip

RUN_TESTS = """
import sys
from pathlib import Path
import pytest
from trencadis.backends.cpu.native import library
held = library.load(Path(sys.argv[1]))
assert held.library is not None, held.why
library.found = lambda: held
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--durations=0", *sys.argv[2:]]))
"""


def run(words: Sequence[str | Path], **more: str) -> None:
    """Runs a command in the checkout, with variables beside those of this process; its failure is this one's."""
    subprocess.run([str(word) for word in words], cwd=ROOT, env={**os.environ, **more}, check=True)


def build(compiler: str, flags: Sequence[str], folder: Path, library: bool) -> Path:
    """The fuzz with the kernels, or the library alone, made of all sources."""
    sources = [*sorted(SOURCES.glob("*.c")), *([] if library else [Path(__file__).with_name("fuzz.c")])]
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as team:
        jobs = [
            team.submit(run, [compiler, *FLAGS, *flags, "-c", source, "-o", made])
            for source, made in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    made = folder / ("_panels.so" if library else "fuzz")
    run([compiler, *flags, *objects, "-o", made, *(["-shared"] if library else ["-lpthread"])])
    return made


def fuzz(kind: str, compiler: str, cases: int, seed: int, folder: Path) -> Path:
    """Runs the fuzz under the sanitizers of ``kind``; returns the folder of the build."""
    home = folder / kind
    home.mkdir()
    program = build(compiler, KINDS[kind], home, library=False)
    run([program, str(cases), str(seed)], TSAN_OPTIONS="halt_on_error=1", UBSAN_OPTIONS="print_stacktrace=1")
    return home


def run_tests(compiler: str, folder: Path) -> None:
    """The kernels' tests on a library with the address and undefined sanitizers; leaks of Python are not ours."""
    home = folder / "tests"
    home.mkdir()
    build(compiler, KINDS["address"], home, library=True)
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    run([sys.executable, "-c", RUN_TESTS, home, *TESTS], LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0", OMP_NUM_THREADS="1")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler", default="gcc")
    parser.add_argument("--only", choices=("address", "thread", "tests", "warnings"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what in ("warnings", "address", "thread", "tests"):
            if args.only not in (None, what):
                continue
            start = time.perf_counter()
            if what == "tests":
                run_tests(args.compiler, folder)
            elif what == "warnings":
                (folder / what).mkdir()
                build(args.compiler, ["-O1", *WARNINGS], folder / what, library=True)
            else:
                fuzz(what, args.compiler, args.cases, args.seed, folder)
            print(f"{what}: nothing found, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
