"""Linear layers on this CPU, packed against plain: milliseconds, GB/s of weights and GFLOP/s.

usage: PYTHONPATH=$PWD python -P benchmarks/ops_cpu.py [threads]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference import ReferenceOps
from trencadis.core.cpus import available_cpus

SIZES = {"qkv": (1152, 896), "gate_up": (9728, 896), "down": (896, 4864), "vision qkv": (3840, 1280)}
ROWS = (1, 8, 32, 128, 512)


def seconds(call: Callable[[], Tensor], repeats: int = 15) -> float:
    """Median CPU seconds of a call; other processes disturb CPU time least."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return sorted(taken)[repeats // 2]


def main() -> None:
    """Prints one line per size and number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("threads", nargs="?", type=int, default=available_cpus())
    count = parser.parse_args().threads
    torch.set_num_threads(count)
    print(f"{torch.__version__}, {count} threads")
    torch.manual_seed(0)
    for name, (outputs, inputs) in SIZES.items():
        weight = torch.randn(outputs, inputs)
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            line = f"{name:10} [{outputs}, {inputs}] x {rows:3}"
            for label, ops in (("packed", CpuOps()), ("plain", ReferenceOps())):
                w = ops.pack_weight(weight)
                with torch.inference_mode():
                    s = seconds(lambda ops=ops, x=x, w=w: ops.linear(x, w))  # type: ignore[misc]
                rate = 2 * weight.numel() * rows / s / 1e9
                line += f"   {label} {s * 1e3:8.3f} ms {weight.nbytes / s / 1e9:6.1f} GB/s {rate:6.1f} GFLOP/s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
