"""Chooses the tiles of this machine's GPU by measurement and writes them into the tile tables.

    python tools/tune_kernels.py [--kernels attend_decode ...] [--heads 128 80] [--bits 16] [--minutes 9] [--out DIR]
                                                                on a GPU: measures, writes after each entry
    python tools/tune_kernels.py --dry-run [--arch 90]          anywhere: lists the candidates

A candidate costs a second or two of compilation, an entry of a table a minute or more. Within ``--minutes`` each entry
has the same share of the time that is left and tries the tiles that are most like the present one first. A candidate is
left out where it does not compile, does not fit the shared memory or (16-bit) spills. The best is the least sum of
times, each relative to the table's present tile, over launches of serving size.
Nothing is tuned while serving: tables are read.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.kernels import attention_cases as cases  # noqa: E402
from benchmarks.kernels import layer_cases, quantised_cases  # noqa: E402
from tools import kernel_resources  # noqa: E402
from tools.compiled.assembly import UNGUARDED  # noqa: E402
from trencadis.backends.cuda.kernels import tile_sizes, vision_attention  # noqa: E402
from trencadis.backends.cuda.kernels.layers import skinny_quantised_gemm  # noqa: E402
from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import FEW  # noqa: E402
from trencadis.backends.cuda.kernels.tile_sizes import Tile, TileEntry  # noqa: E402
from trencadis.backends.cuda.launches.attention_work_items import STEP  # noqa: E402
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme  # noqa: E402

WARPS, STAGES = (4, 8), (1, 2, 3, 4)
GRIDS = {
    "skinny": ((16,), (16, 32, 64)),
    "attend_decode": ((16,), (16, 32, 64)),
    "attend_prefill": ((16, 32, 64, 128), (16, 32, 64, 128)),
    "coded_skinny": ((8, 16), (32, 64, 128)),
    "experts": ((16, 32, 64, 128), (32, 64, 128, 256)),
    "coded_experts": ((16, 32, 64, 128), (16, 32, 64, 128)),
    "quantised": ((16, 32, 64, 128), (32, 64, 128)),
    "attend_windows": ((16, 32, 64), (64,)),
    "attend_images": ((32, 64, 128), (16, 32, 64)),
    "attend_decode_codes": ((16,), (16, 32, 64)),
    "attend_prefill_codes": ((16, 32, 64, 128), (16, 32, 64)),
    "attend_pictures": ((16, 32, 64), (16, 32, 64)),
}
"""Query and key sizes of candidate tiles, rows and features of products: powers of two within the kernels' limits.

In the order in which they are tuned: what takes most of a step first.
"""


MOST_KEYS = 64
"""Keys of a step of prompts, but for launches that ``paged_attention.length_classes`` calls plain: with masks of
windows, or blocks of 128 slots, more keys spill, which a launch that is measured here does not show.
"""


def candidates(kernel: str, entry: TileEntry) -> Iterator[Tile]:
    """Every tile worth compiling for ``entry``, those most like its present one first; float32 products are not
    pipelined.
    """
    queries, keys = GRIDS[kernel]
    stages = STAGES if (entry.bits == 16 and kernel != "attend_windows") or kernel in PRODUCTS else (1,)
    counts = (2, 4) if kernel == "coded_skinny" else (2, 4, 8) if kernel == "coded_experts" else WARPS
    tiles = itertools.starmap(Tile, itertools.product(queries, keys, counts, stages))
    for m, n, warps, count in sorted(tiles, key=lambda tile: unlikeness(tile, entry.tile)):
        if kernel == "coded_skinny" and (m == skinny_quantised_gemm.FEW) != (entry.length == "few"):
            continue
        if entry.length == "prompt" and m != entry.tile.m:
            continue  # both products of experts have the same rows, of which one line says how many
        if kernel == "attend_prefill" and n > MOST_KEYS and entry.length != "plain":
            continue
        if m >= entry.group and (kernel in PRODUCTS or STEP % n == 0) and m * n >= 32 * warps:
            yield Tile(m, n, warps, count)


def unlikeness(tile: Tile, other: Tile) -> float:
    """How often one has to be doubled or halved to become the other; a stage more or less counts as half."""
    doubled = sum(abs(math.log2(a / b)) for a, b in zip(tile[:3], other[:3], strict=True))
    return doubled + abs(tile.stages - other.stages) / 2


PRODUCTS = ("quantised", "skinny", "coded_skinny", "experts", "coded_experts")
"""Kernels whose tiles have features in place of keys."""


def launches(kernel: str, entry: TileEntry, device: torch.device) -> list[cases.Case]:
    """Launches of serving size that use the tile of ``entry``."""
    if kernel == "quantised":
        return products(entry, device)
    if kernel in ("skinny", "coded_skinny"):
        return skinny_products(entry, device, ("int4", "fp8") if kernel == "coded_skinny" else ("",))
    if kernel in ("experts", "coded_experts"):
        codes = Scheme(4, group=32) if kernel == "coded_experts" else None
        sizes = {"few": (1, 8), "prompt": (2048, 8192)}.get(entry.length, (512, 1024))
        # Lines of experts' second product alone are measured with both products of experts without gates.
        return [layer_cases.experts(rows, device, codes=codes, gated=entry.group > 0) for rows in sizes]
    d = entry.head
    dtype = torch.bfloat16 if entry.bits == 16 else torch.float16
    models = [cases.Model(16, 2, d, dtype), cases.Model(28, 4, d, dtype)]
    if entry.bits == 32:
        models = [cases.Model(m.heads, m.kv_heads, d, torch.float32) for m in models]
    short, codes = entry.length == "short", torch.int8 if kernel.endswith("_codes") else None
    if kernel.startswith("attend_decode"):
        sizes = ((1, 8192), (16, 2048), (128, 1024))
        return [cases.decode(m, rows, n, device, codes=codes) for m in models for rows, n in sizes]
    if kernel.startswith("attend_prefill"):
        lengths = (64, FEW - 1) if short else (1024, 4096)
        return [cases.prefill(m, tokens, device, codes=codes) for m in models for tokens in lengths]
    if kernel == "attend_pictures":
        single = entry.length == "one"
        counts = (1, 16) if single else (256, 2048)
        return [cases.cross_attention(models[-1], n, 6404, device, decode=single) for n in counts]
    slots = (vision_attention.SHORT - 64,) if short else (4096, 12544)
    return [cases.vision(kernel == "attend_images", s, 2, device, d=d) for s in slots]


def products(entry: TileEntry, device: torch.device) -> list[cases.Case]:
    """Products of the entry's class of rows with codes of its size, or where groups have scales int4."""
    rows = {"few": (1, 8), "some": (32, 64), "many": (512, 4096)}.get(entry.length, (64, 2048))
    scheme = Scheme(4, group=128) if entry.group else Scheme(entry.head)
    dtype = torch.bfloat16 if entry.bits == 16 else torch.float32
    shapes = quantised_cases.SHAPES[1:3]
    return [quantised_cases.case(scheme.label, scheme, n, shape, device, dtype) for n in rows for shape in shapes]


def skinny_products(entry: TileEntry, device: torch.device, codes: tuple[str, ...]) -> list[cases.Case]:
    """Products of 3B and 7B over each of ``codes``: of gate and up where the entry's ``group`` says so, of the others
    else; 1 and 16 rows, or those of a tile of few.
    """
    dtype = torch.bfloat16 if entry.bits == 16 else torch.float32
    gate = ((22_016, 2048), (37_888, 3584)) if entry.group else ()
    return [
        layer_cases.skinny(rows, *shape, device, dtype, kind, gate=shape in gate)
        for shape in gate or ((2560, 2048), (3584, 18_944))
        for rows in ((1, skinny_quantised_gemm.FEW) if entry.length == "few" else (1, 16) if codes == ("",) else (16,))
        for kind in codes
    ]


def usable(case: cases.Case, entry: TileEntry, kernel: str, tile: Tile) -> bool:
    """Whether ``tile`` compiles for the entry's architecture, fits, waits for its products and (16 bits) does not
    spill.
    """
    tile_sizes.FORCED[kernel] = tile
    try:
        found = [kernel_resources.compiled(case.name, x, entry.arch) for x in kernel_resources.record(case.run)]
    finally:
        tile_sizes.FORCED.clear()
    return all(r.fits and r.wait != UNGUARDED and (entry.bits == 32 or not r.stack) for r in found)


def seconds(run: Callable[[], object], budget: float) -> float:
    """Median seconds of a launch, by device events, over about ``budget`` seconds."""
    run()
    torch.cuda.synchronize()
    taken: list[float] = []
    while sum(taken) < budget or len(taken) < 5:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        taken.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(taken)


def tuned(kernel: str, entry: TileEntry, device: torch.device, budget: float, end: float = math.inf) -> Tile:
    """The fastest usable tile tried by ``end`` (``time.monotonic``); the present one if nothing beats it."""
    work = launches(kernel, entry, device)

    def times(tile: Tile) -> list[float]:
        tile_sizes.FORCED[kernel] = tile
        try:
            return [seconds(case.run, budget) for case in work]
        finally:
            tile_sizes.FORCED.clear()

    base = times(entry.tile)
    best, least = entry.tile, float(len(base))
    for tile in candidates(kernel, entry):
        if time.monotonic() > end:
            print("out of time: not all candidates were tried")
            break
        if tile == entry.tile or not usable(work[0], entry, kernel, tile):
            continue
        score = sum(a / b for a, b in zip(times(tile), base, strict=True))
        if score < least:
            best, least = tile, score
    speed = len(base) / least
    print(
        f"{kernel} {entry.bits} bits, heads to {entry.head}, {entry.length}: {entry.tile} -> {best}, x{speed:.2f}",
        flush=True,
    )
    return best


def write(kernel: str, entries: list[TileEntry], folder: Path | None = None) -> None:
    """The table, as ``tiles.table`` reads it."""
    with ((folder or tile_sizes.FOLDER) / f"{kernel}.csv").open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*TileEntry._fields[:-1], *Tile._fields])
        out.writerows([*e[:-1], *e.tile] for e in entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", nargs="*", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--seconds", type=float, default=0.05, help="seconds of measuring per candidate and launch")
    parser.add_argument(
        "--heads", type=int, nargs="*", help="of attention only entries for heads up to these sizes exactly"
    )
    parser.add_argument("--bits", type=int, choices=(16, 32), help="only entries of so many bits a value")
    parser.add_argument("--minutes", type=float, default=math.inf, help="try no further candidates after so long")
    parser.add_argument("--out", type=Path, default=tile_sizes.FOLDER, help="folder of the tables")
    parser.add_argument("--arch", type=int, default=90, help="architecture whose entries --dry-run lists")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.dry_run:
        for kernel in args.kernels:
            for entry in tile_sizes.entries(kernel, args.arch):
                found = list(candidates(kernel, entry))
                print(f"{kernel} {entry.bits} bits, heads to {entry.head}, {entry.length}: now {entry.tile}")
                print(f"  {len(found)} candidates: " + " ".join("x".join(map(str, t)) for t in found))
        return 0
    if not torch.cuda.is_available():
        print("no NVIDIA device: --dry-run lists what would be measured")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    arch, end = tile_sizes.arch_of(device), time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    known = max((a for a in tile_sizes.SHARED if a <= arch), default=0)
    wanted = {kernel: list(wanted_entries(kernel, known, args.heads, args.bits)) for kernel in args.kernels}
    left = sum(map(len, wanted.values()))
    for kernel, places in wanted.items():
        entries = all_entries(kernel, known)
        for i in places:
            now = time.monotonic()
            if now < end:
                tile = tuned(kernel, entries[i], device, args.seconds, now + (end - now) / left)
                entries[i] = entries[i]._replace(tile=tile)
                write(kernel, entries, args.out)
                torch.cuda.empty_cache()
            left -= 1
    return 0


def all_entries(kernel: str, arch: int) -> list[TileEntry]:
    """The lines of a table, and those that ``arch`` has from its kin so far."""
    entries = list(tile_sizes.table(kernel))
    return entries + [e for e in tile_sizes.entries(kernel, arch) if e not in entries]


def wanted_entries(kernel: str, arch: int, heads: Sequence[int] | None, bits: int | None) -> Iterator[int]:
    """Which of ``all_entries`` are tuned: those of ``arch``, in attention for heads up to one of ``heads`` exactly."""
    for i, entry in enumerate(all_entries(kernel, arch)):
        of_heads = kernel in PRODUCTS or not heads or entry.head in heads
        if entry.arch == arch and of_heads and bits in (None, entry.bits):
            yield i


if __name__ == "__main__":
    sys.exit(main())
