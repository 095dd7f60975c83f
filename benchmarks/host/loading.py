"""How fast a checkpoint's weights arrive, beside what the disk and the memory of this run can do.

python -m benchmarks.host.loading [--model DIR] [--dtype float32,bfloat16] [--repeats 5] [--threads N] [--warm-only]
    [--packed-weights-dir DIR]

One process a measurement, which imports torch first; importing is not counted. They take turns:

* ``disk``: the files' bytes read in order by as many threads, after the page cache was told to drop them;
* ``memory``: a copy of as many bytes as the packed weights take into memory that nothing has touched, by as many
  threads, on huge pages and on small ones: the faster of both is the ceiling;
* ``cold`` and ``warm``: the model loaded and packed, after the page cache dropped the files, and with them in it.

``cold`` counts the files' bytes against the disk, ``warm`` the larger of files and packed weights against the memory.
With ``--packed-weights-dir`` loads are those of a later start, and the files are the one of packed weights; ``cold``
drops the checkpoint too, of which some panels are read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting import Others, environment, median, report, table
from trencadis.core.cpu_affinity import computing_cpus
from trencadis.core.device.packed_weights_file import PackedFile, packed_file
from trencadis.core.engine_config import EngineConfig
from trencadis.core.weight_files import files_of

PIECE, SOURCE = 8 << 20, 256 << 20
KINDS = ("disk", "memory", "cold", "warm")
BAR = 0.8


def drop(files: list[Path]) -> None:
    """Tells the page cache to drop the files."""
    for file in files:
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(files: list[Path]) -> None:
    """Brings the files into the page cache."""
    for file in files:
        with file.open("rb") as f:
            while f.read(PIECE):
                pass


def read(files: list[Path], threads: int) -> float:
    """Seconds that ``threads`` take to read the files in order."""
    spans = [(f, at, min(PIECE, f.stat().st_size - at)) for f in files for at in range(0, f.stat().st_size, PIECE)]

    def some(first: int) -> None:
        room, opened = bytearray(PIECE), {f: f.open("rb", buffering=0) for f in files}
        for file, at, size in spans[first::threads]:
            opened[file].seek(at)
            opened[file].readinto(memoryview(room)[:size])

    return together(some, threads)


def copy(size: int, threads: int, huge: bool) -> float:
    """Seconds that ``threads`` take to copy ``size`` bytes into new memory, from as much as no cache holds."""
    target = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    if huge:
        target.madvise(mmap.MADV_HUGEPAGE)
    source = ctypes.create_string_buffer(SOURCE)
    ctypes.memset(source, 1, SOURCE)
    held = (ctypes.c_char * size).from_buffer(target)
    begin, each = ctypes.addressof(held), size // threads

    def some(first: int) -> None:
        for at in range(first * each, (first + 1) * each, PIECE):
            size = min(PIECE, (first + 1) * each - at)
            ctypes.memmove(begin + at, ctypes.addressof(source) + at % (SOURCE - PIECE), size)

    return together(some, threads)


def together(some: Any, threads: int) -> float:
    """Seconds until ``threads`` have done ``some(number)``."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda i: None, range(threads)))
        start = time.perf_counter()
        list(pool.map(some, range(threads)))
        return time.perf_counter() - start


def kept_file(folder: Path, dtype: str, kept: str) -> PackedFile | None:
    """Where a start keeps packed weights, with ``--packed-weights-dir``."""
    return packed_file(EngineConfig(str(folder), dtype=dtype, packed_weights_dir=kept))


def load(folder: Path, dtype: str, threads: int, packed: PackedFile | None) -> dict[str, Any]:
    """Loads the model as the engine's process does: its files are asked for, then torch is imported."""
    from trencadis.core.checkpoint import weight_prefetch

    import torch  # isort: skip

    from trencadis.backends.cpu import make_backend
    from trencadis.core.checkpoint.config_reader import load_config
    from trencadis.core.device.backend import BackendConfig
    from trencadis.core.models.model_loader import load_model

    config = load_config(folder)
    torch.set_num_threads(threads)
    torch.empty(1 << 16).add_(1)  # its threads are there
    start, busy = time.perf_counter(), time.process_time()
    weight_prefetch.start_prefetch(str(folder), kept=packed and packed.path)
    options = {"threads": str(threads)}
    backend = make_backend(BackendConfig(dtype=getattr(torch, dtype), options=options, packed=packed))
    model = load_model(config, backend)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    writing = getattr(getattr(backend.ops, "pages", None), "writing", None)
    if writing is not None:
        writing.join()
    return {"seconds": seconds, "cpu": cpu, "packed": model.nbytes()}


def one(kind: str, folder: Path, dtype: str, threads: int, size: int, kept: str) -> dict[str, Any]:
    """One measurement, in this process."""
    packed, files = kept_file(folder, dtype, kept), files_of(folder)
    if kind in ("disk", "cold"):
        drop(files)
    files = [packed.path] if packed is not None and packed.path.exists() else files
    if kind in ("disk", "cold"):
        drop(files)
    if kind == "warm":
        fill(files)
    if kind == "disk":
        return {"seconds": read(files, threads)}
    if kind == "memory":
        return {"seconds": min(copy(size, threads, huge) for huge in (True, False, True, False))}
    return load(folder, dtype, threads, packed)


def measured(kind: str, args: argparse.Namespace, dtype: str, size: int) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    flags = [
        "--one",
        kind,
        "--model",
        args.model,
        "--dtype",
        dtype,
        "--threads",
        str(args.threads),
        "--size",
        str(size),
        "--packed-weights-dir",
        args.packed_weights_dir,
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.host.loading", *flags],
        check=True,
        capture_output=True,
        env=environment(),
    )
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def shares(rates: dict[str, float]) -> dict[str, float]:
    """What loading reaches of each ceiling."""
    return {
        "cold of disk": rates["cold"] / rates["disk"] if "cold" in rates else 0.0,
        "warm of memory": rates["warm"] / rates["memory"],
    }


def compare(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """All kinds in turn, ``--repeats`` times: GB/s of medians, and shares."""
    packed = measured("warm", args, dtype, 0)["packed"]  # and a rehearsal
    kept = kept_file(Path(args.model), dtype, args.packed_weights_dir)
    size = sum(f.stat().st_size for f in (files_of(Path(args.model)) if kept is None else [kept.path]))
    most, times = max(size, packed), dict[str, list[dict[str, Any]]]()
    for _ in range(args.repeats):
        for kind in KINDS:
            if not (args.warm_only and kind in ("disk", "cold")):
                times.setdefault(kind, []).append(measured(kind, args, dtype, most))
    counted = {"disk": size, "cold": size, "memory": most, "warm": most}
    rates = {kind: counted[kind] / 1e9 / median([t["seconds"] for t in found]) for kind, found in times.items()}
    return {"dtype": dtype, "bytes": size, "packed": packed, "rates": rates, "shares": shares(rates), "times": times}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=".bench/checkpoints/half", help="checkpoint folder")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=computing_cpus())
    parser.add_argument("--warm-only", action="store_true", help="no measurement that empties the page cache")
    parser.add_argument("--packed-weights-dir", default="", help="measure starts that map what one before packed")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        made = one(args.one, Path(args.model), args.dtype, args.threads, args.size, args.packed_weights_dir)
        print(json.dumps(made))
        return
    others = Others()
    found = [compare(args, dtype) for dtype in args.dtype.split(",")]
    rows = [
        (
            f["dtype"],
            *(f["rates"].get(kind, "") for kind in KINDS),
            *f["shares"].values(),
            median([t["cpu"] for t in f["times"]["warm"]]),
        )
        for f in found
    ]
    text = table(("type", *(f"{kind} GB/s" for kind in KINDS), *found[0]["shares"], "CPU s, warm"), rows)
    report(
        "loading", {"settings": vars(args), "found": found, "others_cores": others.cores()}, text + f"\n\nbar: {BAR}"
    )


if __name__ == "__main__":
    main()
