"""Products of few rows by own kernels and by oneDNN, and the greedy head with and without logits.

python -m benchmarks.host.lm_head [--rows 1,8,32] [--shapes 151936x896,9728x896] [--dtype bfloat16,float32] [--repeats
15]

CPU seconds of one thread, the ways taking turns: the median of each, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.reporting import median, report, table
from trencadis.backends.cpu.native import dense_linear
from trencadis.backends.cpu.native.attention_and_row_kernels import best
from trencadis.backends.cpu.ops import CpuOps, PackedWeight

WAYS = ("oneDNN", "own", "oneDNN and argmax", "own, no logits")


def ways(ops: CpuOps, w: PackedWeight, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is compared; products that nothing serves are left out."""
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def run_onednn() -> torch.Tensor:
        y: torch.Tensor = multiply(x, w.packed, w.bias, "none", [], "")
        return y

    panels = w.panels
    made: dict[str, Callable[[], Any]] = {WAYS[0]: run_onednn, WAYS[2]: lambda: best(run_onednn(), ops.table)}
    if panels is not None:
        made[WAYS[1]] = lambda: dense_linear.product(x, panels)
        made[WAYS[3]] = lambda: dense_linear.best(x, panels, panels.outputs, 1.0)
    return made


def measure(outputs: int, inputs: int, dtype: torch.dtype, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of each way for each number of rows."""
    ops = CpuOps()
    generator = torch.Generator().manual_seed(1)
    w = ops.pack_weight((torch.randn(outputs, inputs, generator=generator) * 0.05).to(dtype))
    assert isinstance(w, PackedWeight)
    found = []
    for count in rows:
        x = torch.randn(count, inputs, generator=generator).to(dtype)
        taken: dict[str, list[float]] = {}
        for turn in range(repeats + 1):
            for name, run in ways(ops, w, x).items():
                start = time.thread_time()
                run()
                if turn:  # the first makes kernels
                    taken.setdefault(name, []).append(1000 * (time.thread_time() - start))
        middle = {name: median(times) for name, times in taken.items()}
        found.append({"shape": f"{outputs}x{inputs}", "dtype": str(dtype)[6:], "rows": count, **middle})
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--shapes", default="151936x896,9728x896,896x4864")
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, found = [int(n) for n in args.rows.split(",")], []
    for dtype in args.dtype.split(","):
        for shape in args.shapes.split(","):
            outputs, inputs = (int(n) for n in shape.split("x"))
            found += measure(outputs, inputs, getattr(torch, dtype), rows, args.repeats)
    lines = [(f["shape"], f["dtype"], f["rows"], *(round(f[w], 3) if w in f else "" for w in WAYS)) for f in found]
    report("head", {"settings": vars(args), "found": found}, table(("weight", "type", "rows", *WAYS), lines))


if __name__ == "__main__":
    main()
