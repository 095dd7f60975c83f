"""Each CUDA kernel against torch's ways to the same result and a ceiling measured in the same run.

usage: PYTHONPATH=$PWD python -P -m benchmarks.kernels [--only head] [--out DIR] [--repeat 100] | --interpret

``--repeat`` times nothing: it runs every case so often and counts the runs whose bits differ from the first one's. Else
it writes kernels.json and kernels.png. Imports torch, numpy and the CUDA backend, so a bare GPU machine runs it from a
checkout. Without an NVIDIA card it ends with 2; ``--interpret`` then runs every case at a tiny size in Triton's
interpreter and compares values, which says nothing about speed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.kernels.case import use_interpreter

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("attention_cases", "sampling_cases", "small_cases", "layer_cases")
NAMED = "quantised"
"""Begins the name of a module whose cases run only when they are asked for: they take minutes of their own."""
FLUSH = 512 << 20
"""Bytes read before each measurement, more than any card's cache."""
REPEATS = 30
AWAY = 0.05
"""Largest difference between a kernel's values and torch's."""
SHORT = 2e-6
"""Seconds of a case's traffic at the ceiling below which it is judged by its time above two empty kernels."""


def main() -> int:
    """Runs the command line: 0; 1 if a case fails or values differ too much; 2 without a card."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "results")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes in Triton's interpreter: values, no speed")
    parser.add_argument("--repeat", type=int, default=0, help="runs whose bits are compared, instead of times")
    args = parser.parse_args()
    use_interpreter(args.interpret)
    import torch

    if args.interpret and args.repeat:
        return repeat(args.only, args.out, args.repeat, torch.device("cpu"))
    if args.interpret:
        return interpret(args.only)
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs an NVIDIA card; --interpret checks that the cases run", file=sys.stderr)
        return 2
    if args.repeat:
        return repeat(args.only, args.out, args.repeat, torch.device("cuda", torch.cuda.current_device()))
    return measure(args.only, args.out)


def modules(only: str = "") -> Iterator[Any]:
    """The modules of cases that can be imported."""
    for name in (f"{NAMED}_cases",) if only.startswith(NAMED) else MODULES:
        if importlib.util.find_spec(f"benchmarks.kernels.{name}") is not None:
            yield importlib.import_module(f"benchmarks.kernels.{name}")


def interpret(only: str) -> int:
    """Runs the small cases once; 1 if values differ."""
    import torch

    failed = 0
    for module in modules(only):
        if "small" not in module.cases.__code__.co_varnames:
            print(f"{module.__name__}: no small cases")
            continue
        for case in module.cases(torch.device("cpu"), small=True):
            if only in case.name and case.check is not None:
                away = case.check()
                failed += away > AWAY
                print(f"{case.name}: largest difference {away:.2g}", flush=True)
    return int(failed > 0)


def repeat(only: str, out: Path, times: int, device: Any) -> int:
    """Runs every case ``times`` times and writes repeats.json; 1 if bits of any run differ from the first one's."""
    import torch

    found: dict[str, Any] = {"cases": {}, "failed": {}}
    out.mkdir(parents=True, exist_ok=True)
    names = [*MODULES, f"{NAMED}_cases"]
    for module in [importlib.import_module(f"benchmarks.kernels.{name}") for name in names]:
        try:
            for case in module.cases(device, small=device.type == "cpu"):
                if only in case.name:
                    found["cases"][case.name] = count_moved(case, times, torch)
        except Exception as error:
            found["failed"][module.__name__] = error_line(error)
        (out / "repeats.json").write_text(json.dumps(found))
    moved = sum(found["cases"].values())
    print(f"{len(found['cases'])} cases, {times} runs each: {moved} runs differ", *found["failed"].values(), sep="\n")
    return int(moved > 0 or bool(found["failed"]))


def count_moved(case: Any, times: int, torch: Any) -> int:
    """Runs whose result's bits differ from those of the first run."""

    def bits() -> Any:
        if case.reset is not None:
            case.reset()
        return case.run().contiguous().view(torch.uint8)

    first = bits().clone()
    moved = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(times):
        moved += (bits() != first).any()
    return int(moved)


# Measuring


def measure(only: str, out: Path) -> int:
    """Runs every case, prints a table, and writes the files after each case. A failed case is a line too."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(), "ceilings": ceilings(timer), "cases": []}
    print(json.dumps(result["machine"] | result["ceilings"], indent=1), flush=True)
    for row in rows(only, device, timer, result["ceilings"]):
        result["cases"].append(row)
        print(line(row), flush=True)
        (out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()
    draw(result, out / "kernels.png")
    print(f"written to {out}/kernels.json")
    return int(any("error" in row or row["away"] > AWAY for row in result["cases"]))


def rows(only: str, device: Any, timer: Timer, tops: dict[str, float]) -> Iterator[dict[str, Any]]:
    """One row per case. If a case cannot be made, the rest of its file is skipped."""
    for module in modules(only):
        try:
            for case in module.cases(device):
                if only in case.name:
                    yield measure_case(case, timer, tops)
        except Exception as error:
            yield {"name": module.__name__, "kernel": "", "error": error_line(error)}


def error_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class Timer:
    """Times a launch by the device's clock: captured, to leave Python out, and with a cold cache.

    Such a time includes the start of a graph, which takes as long as a small kernel. A kernel inside a step's graph
    does not pay it, so ``net`` subtracts the time of an almost empty graph.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.torch = torch
        self._dirt = torch.zeros(FLUSH // 4, dtype=torch.int32, device=device)
        self._most = torch.zeros((), dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device)
        tiny = torch.zeros(16, device=device)
        self.idle = self(lambda: tiny.zero_())
        self.pair = self(lambda: (tiny.zero_(), tiny.zero_()))

    def __call__(self, call: Callable[[], object]) -> float:
        """Seconds, the median of REPEATS; runs uncaptured what cannot be captured."""
        torch = self.torch
        replay = self._captured(call)
        taken = []
        for _ in range(REPEATS):
            self._flush()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        return statistics.median(taken)

    def net(self, call: Callable[[], object]) -> float:
        """Seconds less the start of a graph; at least half of what was measured."""
        taken = self(call)
        return max(taken - self.idle, taken / 2)

    def _flush(self) -> None:
        """Flushes the cache by reads: written lines would be stored back while the launch is timed."""
        self.torch.amax(self._dirt, 0, out=self._most)

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        torch = self.torch
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        if self._waits(call):
            return call
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    call()
                finally:
                    graph.capture_end()
        except RuntimeError:
            torch.cuda.synchronize()
            return call
        return graph.replay

    def _waits(self, call: Callable[[], object]) -> bool:
        """Whether ``call`` waits for the device: capturing that would break torch's allocator."""
        torch = self.torch
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False


def ceilings(timer: Timer) -> dict[str, float]:
    """Copy and read bandwidth in GB/s, bf16 matrix products in TFLOP/s, microseconds of a graph that does little."""
    torch = timer.torch
    half = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    words = half.view(torch.int32)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {
        "copy": 2 * half.nbytes / timer.net(lambda: other.copy_(half)) / 1e9,
        "read": half.nbytes / timer.net(lambda: words.amax()) / 1e9,
        "flops": 2 * 8192**3 / timer.net(lambda: a @ b) / 1e12,
        "launch_us": timer.idle * 1e6,
    }


def measure_case(case: Any, timer: Timer, tops: dict[str, float]) -> dict[str, Any]:
    """Measures one case. ``share``: of the ceiling that bounds it."""
    bound = {"bytes": "copy"}.get(case.bound, case.bound)
    row = {"name": case.name, "kernel": case.kernel, "bound": bound, "away": 0.0, "baselines": {}}
    try:
        row["away"] = float(case.check()) if case.check is not None else 0.0
        seconds = timer.net(case.run)
    except Exception as error:
        return row | {"error": error_line(error)}
    rate = case.flops / seconds / 1e12 if bound == "flops" else case.bytes / seconds / 1e9
    row |= {"microseconds": seconds * 1e6, "rate": rate, "share": rate / tops[bound]}
    least = 0.0 if bound == "flops" else case.bytes / tops[bound] / 1e9
    if 0 < least < SHORT:  # the start of its kernels takes as long as the traffic does
        row["share"] = least / max(timer(case.run) - timer.pair, least)
    for name, call in case.baselines.items():
        try:
            row["baselines"][name] = timer.net(call) * 1e6
        except Exception as error:  # a back-end that this card or this torch lacks
            row["baselines"][name] = error_line(error)[:120]
    return row


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    if "error" in row:
        return f"{row['name']:50} FAILED  {row['error']}"
    unit = "TFLOP/s" if row["bound"] == "flops" else "GB/s"
    text = f"{row['name']:50} {row['microseconds']:9.1f} us {row['rate']:8.1f} {unit}"
    text += f" {row['share']:6.0%} of {row['bound']}"
    for name, value in row["baselines"].items():
        text += f"   {name} " + (f"{value:.1f} us" if isinstance(value, float) else "none")
    return text + f"   away {row['away']:.2g}"


def machine() -> dict[str, str]:
    """Card, driver and versions: the context of every figure."""
    import torch
    import triton

    query = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    try:
        card = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        card = torch.cuda.get_device_name()
    return {
        "card": card, "torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": triton.__version__,
        "python": platform.python_version(), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar per case: its share of the ceiling, and of each baseline's speed. Needs Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        print("Pillow is missing: kernels.png is not drawn")
        return
    rows, step, left, width = [r for r in result["cases"] if "share" in r], 22, 380, 1000
    image = Image.new("RGB", (width, 60 + step * max(len(rows), 1)), "white")
    pen = ImageDraw.Draw(image)
    pen.text((10, 10), f"{result['machine']['card']}: share of the measured ceiling (full scale 100 %)", fill="black")
    scale = width - left - 90
    for i, row in enumerate(rows):
        y = 40 + i * step
        pen.text((10, y), row["name"][:58], fill="black")
        pen.rectangle((left, y, left + int(scale * min(row["share"], 1.0)), y + 12), fill=(58, 110, 165))
        times = [v for v in row["baselines"].values() if isinstance(v, float)]
        if times:
            best = min(row["share"] * row["microseconds"] / min(times), 1.0)
            pen.line((left + int(scale * best), y - 2, left + int(scale * best), y + 14), fill=(200, 60, 40), width=2)
        pen.text((width - 80, y), f"{row['share']:.0%}", fill="black")
    pen.text((left, 24), "blue: ours; red line: the best of torch", fill="black")
    image.save(path)
