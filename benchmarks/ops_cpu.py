"""Linear layers on this CPU, packed against plain: milliseconds, GB/s of weights and GFLOP/s; then attention of
decoding rows with a window, as a share of its time without. ``products``: own kernels in bfloat16, int8 and int4
beside oneDNN's in bfloat16, as ratios of alternating calls. ``experts``: those of gpt-oss-20b's sizes in MXFP4 and in
bfloat16, in turn. ``sampling``: rows that draw from 151,936 ids, beside the reference, which takes all rows at once.

usage: PYTHONPATH=$PWD python -P benchmarks/ops_cpu.py [threads] [--only linear|windows|products|experts|sampling]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.decode_attention import read_rate
from trencadis.backends.cpu.attention_plan import CpuAttn
from trencadis.backends.cpu.native.kernel_choice_by_cpu import TORCH, table_of
from trencadis.backends.cpu.ops import CpuOps
from trencadis.backends.cpu.reference_ops import CLAMPED_SWIGLU, ReferenceOps
from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.device.backend import HeadTensors, LayerKV, SamplerState, Weight
from trencadis.core.quant.online_quant import quantise
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import FP4_HALVES, Scheme

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
    runs = {"linear": linears, "windows": windows, "products": products, "experts": experts, "sampling": sampling}
    parser.add_argument("--only", choices=tuple(runs), default="")
    requested = parser.parse_args()
    count = requested.threads
    torch.set_num_threads(count)
    print(f"{torch.__version__}, {count} threads")
    torch.manual_seed(0)
    for name, run in runs.items():
        if requested.only in ("", name):
            run()


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


def products(pairs: int = 20) -> None:
    """Median milliseconds of a product by each kind of weight, and how many times as fast as oneDNN's it is: the
    median of the pairs, with its 95 % interval.
    """
    own, plain = CpuOps(), CpuOps()
    plain.table = table_of(TORCH, ())
    print(own.table.line())
    for name, (outputs, inputs) in SIZES.items():
        weight = torch.randn(outputs, inputs).bfloat16()
        held = {
            "bfloat16": own.pack_weight(weight),
            "int8": own.pack_quantised(quantise(weight, Scheme(8), torch.bfloat16)),
            "int4": own.pack_quantised(quantise(weight, Scheme(4, group=32), torch.bfloat16)),
        }
        theirs = plain.pack_weight(weight)
        for rows in (1, 4, 5, 16, 32, 128, 512, 2048):
            x = torch.randn(rows, inputs).bfloat16()
            line = f"{name:10} [{outputs}, {inputs}] x {rows:4}"
            for label, packed in held.items():
                with torch.inference_mode():
                    found = [(least(plain, theirs, x), least(own, packed, x)) for _ in range(pairs)]
                ratios = [one / other for one, other in found]
                low, high = interval(ratios)
                taken = 1e3 * float(np.median([other for _, other in found]))
                line += f"   {label} {taken:8.3f} ms {np.median(ratios):5.2f}x ({low:.2f} to {high:.2f})"
            print(line, flush=True)


EXPERTS, CHOSEN, WIDTH = 8, 4, 2880
"""Experts of a layer here (gpt-oss-20b has 32), those of a token, and the width of the layer and of an expert."""


def experts(pairs: int = 20) -> None:
    """Median milliseconds of a layer of experts, as values of 16 bits and as MXFP4's codes, and their ratio.

    For one row also the time over that of reading its experts, at the best rate of reads before and after.
    """
    ops, halves = CpuOps(), torch.tensor(FP4_HALVES, dtype=torch.int8)
    plain, coded = [], []
    for outputs in (2 * WIDTH, WIDTH):
        codes = [halves[torch.randint(0, 16, (outputs, WIDTH))] for _ in range(EXPERTS)]
        scale = torch.full((outputs, WIDTH // 32), 2.0**-9)
        scheme = Scheme(8, group=32, fp4=True)
        coded.append([QTensor(scheme, one, scale, None, 32, None, torch.bfloat16) for one in codes])
        plain.append([one.values() for one in coded[-1]])
    packed, memory = ops.pack_quantised_experts(coded[0], coded[1]), torch.ones(1 << 27)
    sides = ops.pack_experts(plain[0], plain[1]), packed
    held_bytes = sum(one.nbytes for some in plain for one in some), packed.nbytes
    read = max(read_rate(memory) for _ in range(5))
    for rows in (1, 2, 4, 8, 32):
        taken: tuple[list[float], list[float]] = ([], [])
        x = torch.randn(rows, WIDTH).bfloat16()
        for _ in range(pairs + 1):
            scores = torch.randn(rows, EXPERTS)
            for held, w in zip(taken, sides, strict=True):
                start = time.perf_counter()
                ops.experts(x, scores, w, CHOSEN, True, CLAMPED_SWIGLU)
                held.append(time.perf_counter() - start)
        found = [1e3 * float(np.median(held[1:])) for held in taken]
        ratios = [one / other for one, other in zip(taken[0][1:], taken[1][1:], strict=True)]
        low, high = interval(ratios)
        print(f"{rows:3} rows: bfloat16 {found[0]:.2f} ms, MXFP4 {found[1]:.2f} ms: "
              f"{np.median(ratios):.2f}x ({low:.2f} to {high:.2f}), bar 1.6", flush=True)  # fmt: skip
        if rows == 1:
            read = max(read, *(read_rate(memory) for _ in range(5)))
            shares = [ms / 1e3 * read * EXPERTS / CHOSEN / size for ms, size in zip(found, held_bytes, strict=True)]
            print(f"  one row over reading its experts at {read / 1e9:.1f} GB/s: bfloat16 {shares[0]:.2f}, MXFP4 "
                  f"{shares[1]:.2f}, bar 1.3", flush=True)  # fmt: skip


VOCAB = 151_936


def sampling() -> None:
    """Compares the CPU's launch of SAMPLE, in all its parts, with the reference's, with and without filters."""
    for rows in (1, 4, 32, 256):
        state = SamplerState(
            torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows + 1, VOCAB, dtype=torch.int32),
            torch.zeros(rows + 1, VOCAB // 8, dtype=torch.uint8), torch.zeros(rows + 1, 300, dtype=torch.int64),
            torch.zeros(rows + 1, 300),
        )  # fmt: skip
        logits, number, zeros = torch.randn(rows, VOCAB) * 3, torch.arange(1, rows + 1), torch.zeros(rows)
        for name, top_k, top_p in (("plain", 0, 1.0), ("top-k 40, top-p 0.9", 40, 0.9)):
            head = HeadTensors(
                number, number, zeros + 0.8, zeros.int() + top_k, zeros + top_p, zeros, zeros, zeros, zeros + 1,
                torch.rand(rows), zeros.long() - 1, zeros.long(), torch.full((1, VOCAB // 8), 255, dtype=torch.uint8),
            )  # fmt: skip
            ours, theirs = (
                1e3 * seconds(partial(_sample, ops, logits, head, state), 64 // rows * 2 + 1)
                for ops in (CpuOps(), ReferenceOps())
            )
            print(f"sampling {rows:3} rows, {name}: {ours:7.1f} ms, the reference {theirs:7.1f} ms")


def _sample(ops: ReferenceOps, logits: Tensor, head: HeadTensors, state: SamplerState) -> Tensor:
    return ops.sample(logits, head, state, True).token


def least(ops: CpuOps, w: Weight, x: Tensor) -> float:
    """Returns the least seconds of three calls after one that wakes the threads of this side."""
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        ops.linear(x, w)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median, by order statistics."""
    ordered, n = sorted(values), len(values)
    away = 0.98 * n**0.5
    return ordered[max(round(n / 2 - away) - 1, 0)], ordered[min(round(n / 2 + away), n - 1)]


if __name__ == "__main__":
    main()
