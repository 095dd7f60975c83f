"""Attention of decoding rows on this CPU: bytes of keys and values a second, beside the rate at which memory is read.

python -m benchmarks.decode_attention [--threads N] [--kinds avx2,avx512,...] [--pairs 20] [--in-order] [--quick]

Rows of 2,048 keys each, in blocks that lie in any order, as in a cache that was used before; ``--in-order``: in the
order of memory, as in a new one. Each call reads another layer's cache, so that nothing is in the CPU's caches. Two
kinds of reads, by torch's threads, take turns with groups of calls: of memory in its order, and of blocks of the same
size in the order of the rows' tables, which is slower, whoever reads them. "avx512_bf16" are the kernels of the best
kind with products of pairs of bfloat16, which the others do not use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.reporting import Others, machine, median, report, table
from trencadis.backends.cpu.native import attention_and_row_kernels, kernel_choice_by_cpu, kernel_library
from trencadis.backends.cpu.native.attention_and_row_kernels import SingleTokenRows
from trencadis.backends.cpu.native.kernel_choice_by_cpu import KernelTable, table_of
from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.device.backend import LayerKV

KEYS, BLOCK = 2048, 16
ROWS = (8, 32)
SHAPES = ((14, 2, 64), (16, 2, 128), (28, 4, 128), (8, 8, 128), (8, 8, 64), (10, 10, 80), (16, 2, 256))
"""Query heads, KV heads and values of a head."""
CACHES = ("bfloat16", "float32", "int8", "fp8")
BYTES = 256 << 20
"""Bytes of the caches that calls read in turn: more than the CPU's caches hold."""
PAIRS = "avx512_bf16"
BAR = 0.55
"""Least share of the read rate for bfloat16 without tiles."""


GROUP = 5
"""Calls between two reads of memory."""
CALM = 0.02
"""Seconds after which torch's threads no longer spin: they would keep those of the kernels from running."""


def read_rate(memory: Tensor) -> float:
    """Bytes a second of one read of ``memory``, by torch's threads."""
    begun = time.perf_counter()
    memory.amax()
    return memory.nbytes / (time.perf_counter() - begun)


def block_rate(memory: Tensor, size: int, in_order: bool) -> float:
    """Bytes a second at which torch adds up the blocks of ``size`` bytes of ``memory``, in any order or their own."""
    blocks = memory.view(-1, size // memory.element_size())
    order = torch.arange(len(blocks)) if in_order else torch.randperm(len(blocks))
    begun = time.perf_counter()
    torch.nn.functional.embedding_bag(order, blocks, torch.arange(0, len(order), len(order) // 64), mode="sum")
    return memory.nbytes / (time.perf_counter() - begun)


def kinds(asked: str) -> dict[str, KernelTable]:
    """Tables of the kinds of kernels that run here, by name."""
    features = kernel_library.load_library().features
    names = [kind for kind in kernel_choice_by_cpu.available_kinds() if kind != "amx"]
    found = {kind: replace(table_of(kind, features), bfloat16_pairs=False) for kind in names}
    if PAIRS in features:
        found[PAIRS] = table_of(names[-1], features)
    return {name: found[name] for name in (asked.split(",") if asked else found)}


def make_cache(name: str, slots: int, groups: int, size: int) -> LayerKV:
    """Random keys and values of one layer."""
    shape = (slots // BLOCK, BLOCK, groups, size)
    if name in ("int8", "fp8"):
        codes = [torch.randint(0, 120, shape, dtype=torch.uint8) for _ in "kv"]
        held = [t.view(torch.int8) for t in codes] if name == "int8" else codes
        return LayerKV(held[0], held[1], *(torch.full(shape[:3], 0.01, dtype=torch.float16) for _ in "kv"))
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    return LayerKV(*(torch.randn(shape, dtype=torch.float32).to(dtype) for _ in "kv"))


def make_calls(
    name: str, rows: int, shape: tuple[int, int, int], chosen: KernelTable, in_order: bool = False
) -> tuple[int, list[Callable[[], None]]]:
    """Returns the bytes that a call reads, and calls over different caches."""
    heads, groups, size = shape
    slots = rows * KEYS
    first = make_cache(name, slots, groups, size)
    count = first.k.nbytes + first.v.nbytes
    caches = [first, *(LayerKV(*(t.clone() for t in first[:2]), *first[2:]) for _ in range(max(1, BYTES // count)))]
    blocks = np.arange(slots // BLOCK, dtype=np.int32)
    order = blocks if in_order else np.random.default_rng(0).permutation(blocks)
    numbers = np.arange(rows, dtype=np.int32)
    seen = SingleTokenRows(
        numbers, numbers, np.zeros_like(numbers), np.full_like(numbers, KEYS),
        torch.from_numpy(order.reshape(rows, KEYS // BLOCK)),
    )  # fmt: skip
    q = torch.randn(rows, heads, size).to(torch.float32 if name == "float32" else torch.bfloat16)
    out, scale = torch.empty_like(q), size**-0.5

    def call(kv: LayerKV) -> Callable[[], None]:
        return lambda: attention_and_row_kernels.attend_decode(q, kv, seen, scale, out, chosen)

    return count, [call(kv) for kv in caches]


def measure(
    count: int, calls: list[Callable[[], None]], memory: Tensor, pairs: int, read_blocks: Callable[[], float]
) -> tuple[float, float, float]:
    """Returns the medians of the calls' bytes a second and of their shares of both read rates beside them."""
    rates, shares, of_blocks = list[float](), list[float](), list[float]()
    for call in calls:
        call()
    for number in range(0, pairs, GROUP):
        read, blocks = read_rate(memory), read_blocks()
        time.sleep(CALM)
        calls[number % len(calls)]()  # wakes the kernels' threads
        taken = list[float]()
        for each in range(1, GROUP + 1):
            begun = time.perf_counter()
            calls[(number + each) % len(calls)]()
            taken.append(time.perf_counter() - begun)
        read, blocks = max(read, read_rate(memory)), max(blocks, read_blocks())
        rates += [count / one for one in taken]
        shares += [count / one / read for one in taken]
        of_blocks += [count / one / blocks for one in taken]
    return median(rates), median(shares), median(of_blocks)


def main() -> None:
    """Prints one line per shape and kind of kernels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--kinds", default="", help="kinds of kernels, with commas between; default: all of this CPU")
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--pairs", type=int, default=20, help="calls of each case")
    parser.add_argument("--in-order", action="store_true", help="blocks lie in the order of the rows' tables")
    parser.add_argument("--quick", action="store_true", help="two shapes, 8 rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    memory, others, found = torch.ones(64 << 20), Others(), list[tuple[object, ...]]()
    for rows in ROWS[:1] if args.quick else ROWS:
        for shape in SHAPES[:2] if args.quick else SHAPES:
            for cache in args.caches.split(","):
                for name, chosen in kinds(args.kinds).items():
                    if name == PAIRS and cache == "float32":
                        continue
                    with torch.inference_mode():
                        count, calls = make_calls(cache, rows, shape, chosen, args.in_order)
                        block = count // 2 // (rows * KEYS // BLOCK)
                        reader = partial(block_rate, memory, 1 << (block - 1).bit_length(), args.in_order)
                        rate, *shares = measure(count, calls, memory, args.pairs, reader)
                    found.append((rows, *shape, cache, name, round(rate / 1e9, 1), *(round(one, 2) for one in shares)))
                    print(*found[-1], flush=True)
    columns = ("rows", "heads", "KV heads", "size", "cache", "kernels", "GB/s", "of the read rate", "of blocks'")
    text = f"{', '.join(f'{k}: {v}' for k, v in machine().items())}; bar in bfloat16: {BAR}\n\n{table(columns, found)}"
    report("decode_attention", {"threads": args.threads, "rows": found, "others_cores": others.cores()}, text)


if __name__ == "__main__":
    main()
