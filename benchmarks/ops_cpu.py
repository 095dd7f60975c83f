"""Linear layers on this CPU, packed against plain: milliseconds, GB/s of weights and GFLOP/s; then attention of
decoding rows with a window, as a share of its time without.

usage: PYTHONPATH=$PWD python -P benchmarks/ops_cpu.py [threads] [--only linear|windows]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.cpu.attention_plan import CpuAttn
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import ReferenceOps
from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.device.backend import LayerKV

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


CONTEXT, BLOCK, WINDOWS = 16384, 16, (1024, 4096)
HEADS, GROUPS, HEAD_SIZE = 14, 2, 64
"""Those of Qwen2.5-0.5B."""


def decoding(rows: int) -> Callable[[int], Callable[[], Tensor]]:
    """``decoding(rows)(window)``: attention of one layer, ``rows`` tokens that each have ``CONTEXT`` keys."""
    held = CONTEXT // BLOCK
    order = np.random.default_rng(0).permutation(rows * held).astype(np.int32)  # in a cache that was used before
    attn = CpuAttn(
        torch.tensor([*range(rows + 1), rows], dtype=torch.int32),
        torch.tensor([CONTEXT - 1] * rows + [0], dtype=torch.int32),
        torch.from_numpy(np.concatenate([order, np.zeros(held, np.int32)]).reshape(rows + 1, held)),
        torch.zeros(rows, dtype=torch.int64),
    )
    attn.block_size = BLOCK
    kv = LayerKV(*torch.randn(2, rows * held, BLOCK, GROUPS, HEAD_SIZE))
    q, k, v = (torch.randn(rows, heads, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS))
    ops = CpuOps()
    return lambda window: lambda: ops.attend(q, k, v, kv, attn, HEAD_SIZE**-0.5, window)


def main() -> None:
    """Prints one line per size and number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("threads", nargs="?", type=int, default=available_cpus())
    parser.add_argument("--only", choices=("linear", "windows"), default="")
    requested = parser.parse_args()
    count = requested.threads
    torch.set_num_threads(count)
    print(f"{torch.__version__}, {count} threads")
    torch.manual_seed(0)
    if requested.only != "windows":
        linears()
    if requested.only != "linear":
        windows()


def windows() -> None:
    """Decoding with and without a window; runs alternate, so that the machine's other work meets both alike."""
    for rows in (1, 8):
        layer = decoding(rows)
        for window in WINDOWS:
            with torch.inference_mode():
                shares = []
                for _ in range(5):
                    full, short = seconds(layer(0), 5), seconds(layer(window), 5)
                    shares.append(short / full)
            print(
                f"decode {rows} rows x {CONTEXT} keys: {full * 1e3:7.2f} ms, window {window}: {short * 1e3:7.2f} ms, "
                f"{sorted(shares)[2]:.2f} of it ({min(shares):.2f} to {max(shares):.2f})",
                flush=True,
            )


def linears() -> None:
    """Packed and plain weights."""
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
