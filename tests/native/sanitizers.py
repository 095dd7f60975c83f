"""Builds the kernels with sanitizers, and runs their tests and a seeded fuzz.

python -m tests.native.sanitizers [--cases 200] [--seed 1] [--compiler gcc] [--only warnings|address|thread]

warnings: none, by -Wall -Wextra and more. address: out of bounds, leaks and undefined behaviour, in the fuzz and in the
kernels' own tests. thread: races. The first that finds anything ends the run.
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
    "thread": ("-O0", "-fsanitize=thread"),
}
"""-O0 where what is found does not depend on it: instrumented kernels take minutes to optimise."""

QUICK = {"panels_amx_emulated": "-O1"}
"""Files that are quickly optimised, and slow without."""

TESTS = (
    "tests/ops/test_rotary.py",
    "tests/ops/test_recurrent_kernels.py",
    "tests/ops/test_adapter_kernels.py",
    "tests/ops/test_tiles.py",
    "tests/native/test_few_experts.py",
    "tests/host/test_best_head.py",
    "tests/host/test_packing.py",
    "tests/host/test_decode_attention.py",
    "tests/quant/test_native.py",
)

RUN_TESTS = """
import sys
from pathlib import Path
import pytest
from trencadis.backends.cpu.native import kernel_library
load, own = kernel_library.open_library, Path(kernel_library.__file__).parent
kernel_library.open_library = lambda folder: load(Path(sys.argv[1]) if folder == own else folder)
kernel_library.load_library.cache_clear()
assert kernel_library.load_library().library is not None, kernel_library.load_library().why
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--durations=3", *sys.argv[2:]]))
"""


def run(words: Sequence[str | Path], **more: str) -> None:
    """Runs a command in the checkout, with variables beside those of this process; its failure is this one's."""
    subprocess.run([str(word) for word in words], cwd=ROOT, env={**os.environ, **more}, check=True)


def build(compiler: str, flags: Sequence[str], folder: Path) -> None:
    """Makes the library ``_panels.so`` and the program ``fuzz`` of all sources, in a new folder."""
    folder.mkdir()
    program = sorted(Path(__file__).parent.glob("fuzz*.c"))
    sources = [*sorted(SOURCES.glob("*.c")), *program]
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as team:
        jobs = [
            team.submit(run, [compiler, *FLAGS, *flags, QUICK.get(source.stem, flags[0]), "-c", source, "-o", made])
            for source, made in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    # The library needs nothing but libc: a C program may load it.
    whole = [] if any("sanitize" in flag for flag in flags) else ["-Wl,--no-undefined"]
    run([compiler, *flags, *objects[: -len(program)], "-shared", *whole, "-o", folder / "_panels.so"])
    run([compiler, *flags, *objects, "-o", folder / "fuzz", "-lpthread", "-lm"])


def fuzz(home: Path, cases: int, seed: int) -> None:
    """Runs the fuzz that was built in ``home``."""
    run([home / "fuzz", str(cases), str(seed)], TSAN_OPTIONS="halt_on_error=1", UBSAN_OPTIONS="print_stacktrace=1")


def run_tests(compiler: str, home: Path) -> None:
    """The kernels' tests on a library with the address and undefined sanitizers; leaks of Python are not ours."""
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    run(
        [sys.executable, "-c", RUN_TESTS, home, *TESTS],
        LD_PRELOAD=runtime,
        ASAN_OPTIONS="detect_leaks=0",
        OMP_NUM_THREADS="1",
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler", default="gcc")
    parser.add_argument("--only", choices=("warnings", "address", "thread"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for what in ("warnings", "address", "thread"):
            if args.only in (None, what):
                start, home = time.perf_counter(), Path(name) / what
                build(args.compiler, KINDS.get(what, ("-O1", *WARNINGS)), home)
                if what in KINDS:
                    fuzz(home, args.cases, args.seed)
                if what == "address":
                    run_tests(args.compiler, home)
                print(f"{what}: nothing found, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
