"""``trencadis bench startup``: seconds until an engine is ready, each time in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from trencadis.core.errors import StartupError
from trencadis.core.flag_declaration import FlagValue
from trencadis.core.json_types import JsonObject
from trencadis.server.bench import offline_benchmarks
from trencadis.server.bench.bench_command import OneLineParser

ONCE = "trencadis.server.bench.bench_startup_child"
CACHES = ("TRENCADIS_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Cache folders, in which earlier starts leave files that later ones use."""
REPORTED_TIMES = {
    "startup": ("total_startup_time", "Startup time"),
    "compilation": ("compilation_time", "Compilation time"),
}


def parser() -> OneLineParser:
    """Returns the parser of the benchmark's own flags."""
    made = OneLineParser(
        "trencadis bench startup", allow_abbrev=False,
        description="Seconds of a start-up, without and with what earlier ones left. Flags of the engine may follow.",
    )  # fmt: skip
    add = made.add_argument
    add("--num-iters-cold", type=int, default=3, help="starts with empty caches, weights read from the disk")
    add("--num-iters-warmup", type=int, default=1, help="starts that fill the caches")
    add("--num-iters-warm", type=int, default=3, help="starts after that")
    add("--output-json", metavar="FILE", help="write the figures there")
    return made


def main(words: Sequence[str]) -> int:
    """Runs the benchmark.

    Raises:
        StartupError: a flag is wrong, or the engine cannot start.
    """
    args, options = offline_benchmarks.parse_engine_args(parser(), words)
    if min(args.num_iters_cold, args.num_iters_warm) < 1:
        raise StartupError("--num-iters-cold and --num-iters-warm must be at least 1.")
    cold = []
    for _ in range(args.num_iters_cold):
        with _use_empty_caches() as environ:
            dropped = forget_pages(options.get("model", ""))
            cold.append(start(options, environ))
    for _ in range(args.num_iters_warmup):
        start(options, os.environ)
    warm = [start(options, os.environ) for _ in range(args.num_iters_warm)]
    made: JsonObject = {"cold_pages_dropped": dropped}
    for phase, runs in (("cold", cold), ("warm", warm)):
        print(f"\n{phase.upper()} STARTUP:")
        for name, (key, title) in REPORTED_TIMES.items():
            values = [run[key] for run in runs]
            found = offline_benchmarks.compute_percentiles(values)
            print(f"Avg {title.lower()}: {np.mean(values):.2f} seconds")
            print(f"{title} percentiles:")
            print("\n".join(f"  {p}%: {value:.2f} seconds" for p, value in found.items()))
            made |= {f"avg_{phase}_{name}_time": float(np.mean(values)), f"{phase}_{name}_times": values}
            made[f"{phase}_{name}_percentiles"] = found
        made[f"{phase}_phases"] = [run["phases"] for run in runs]
    offline_benchmarks.save(args.output_json, made)
    return 0


@contextlib.contextmanager
def _use_empty_caches() -> Iterator[dict[str, str]]:
    """Yields an environment whose caches are empty folders."""
    with tempfile.TemporaryDirectory(prefix="trencadis-startup-") as folder:
        yield {**os.environ, **{name: str(Path(folder) / name.lower()) for name in CACHES}}


def forget_pages(model: str) -> bool:
    """Asks the system to drop the cached pages of the weights, so that they are read from the disk.

    Returns False if there is no folder of weights or no such call.
    """
    from trencadis.assets import demo_path

    folder = Path(model).expanduser() if model else Path(demo_path())
    if not folder.is_dir() or not hasattr(os, "posix_fadvise"):
        return False
    for file in (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    return True


def start(options: Mapping[str, FlagValue], environ: Mapping[str, str]) -> dict[str, FlagValue]:
    """Measures one start-up in a process of its own.

    Raises:
        StartupError: it failed; the message is the engine's.
    """
    command = [sys.executable, "-P", "-m", ONCE]
    done = subprocess.run(
        command, input=json.dumps(dict(options)), capture_output=True, text=True, env=dict(environ), check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise StartupError(last.removeprefix("trencadis: "))
    return dict(json.loads(done.stdout.splitlines()[-1]))
