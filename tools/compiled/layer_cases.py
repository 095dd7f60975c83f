"""The launches of whole decoder layers (``backends/cuda/kernels/layers``) at the sizes of real models, for
``tools.kernel_cases``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trencadis.backends.cpu.reference_ops import PlainWeight
from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.kernels.attention_metadata import ItemAttn, SingleAttn
from trencadis.backends.cuda.kernels.layers import fused_decode_attention, fused_verify_attention, skinny_gemm
from trencadis.backends.cuda.kernels.peers import one_shot_reduce, two_shot_reduce
from trencadis.core.device.backend import LayerKV, Rotary

Case = tuple[str, Callable[[], None]]
ROWS, BLOCK, WINDOW = 16, 16, 1024


class LayerSizes(NamedTuple):
    """One rank's share of a layer."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    d: int
    bias: bool = True


MODELS = {
    "3B": LayerSizes(2048, 11_008, 16, 2, 128),
    "7B": LayerSizes(3584, 18_944, 28, 4, 128),
    "72B on four": LayerSizes(8192, 7424, 16, 2, 128),
    "Llama 8B": LayerSizes(4096, 14_336, 32, 8, 128, False),
}


EXTRAS = {64: ("", "sinks"), 128: ("", "norms", "window"), 256: ("", "gates")}
"""Forms of attention by size of head, in bfloat16; gpt-oss has sinks, Qwen3.5 gates beside norms."""


def layers(arch: int) -> Iterator[Case]:
    """Every product of each model in bfloat16, of the first one in the other types; attention by size of head."""
    tile_sizes.INTERPRETED = arch
    tile_sizes.find.cache_clear()
    tile_sizes.arch_of.cache_clear()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        label = str(dtype).removeprefix("torch.")
        for name, sizes in MODELS.items() if dtype == torch.bfloat16 else [*MODELS.items()][:1]:
            yield from ((f"{label} {name}, {part}", run) for part, run in products(sizes, dtype))
        for d in (64, 80, 128, 256):
            extras = EXTRAS.get(d) if dtype == torch.bfloat16 else None
            for extra in extras or ("",):
                yield f"{label} head {d} {extra}".strip(), attention(d, dtype, extra)
                yield f"{label} head {d} verify {extra}".strip(), attention(d, dtype, extra, verify=True)


def products(sizes: LayerSizes, dtype: torch.dtype) -> Iterator[Case]:
    hidden, inner, heads, kv_heads, d, bias = sizes
    x = torch.empty(ROWS, hidden, dtype=dtype)
    total, arrived = torch.empty_like(x), torch.empty(skinny_gemm.COUNTERS, dtype=torch.int32)
    first, later = skinny_gemm.NormOf(x[0], 1e-6), skinny_gemm.NormOf(x[0], 1e-6, x, total)

    def weight(features: int, columns: int, biased: bool = False) -> PlainWeight:
        held = torch.empty(features, columns, dtype=dtype)  # never touched
        return PlainWeight(held, torch.empty(features, dtype=dtype) if biased else None, features, columns)

    qkv, out = weight((heads + 2 * kv_heads) * d, hidden, bias), weight(hidden, heads * d)
    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    seen, inside = torch.empty(ROWS, heads * d, dtype=dtype), torch.empty(ROWS, inner, dtype=dtype)

    def run(
        given: Tensor, w: PlainWeight, norm: skinny_gemm.NormOf | None = None, **options: Any
    ) -> Callable[[], None]:
        return lambda: (skinny_gemm.product(given, w, arrived, norm, **options), None)[1]

    yield "qkv", run(x, qkv, first)
    yield "qkv of ranks", run(x, qkv, later)
    yield "output", run(seen, out, residual=x)
    yield "gate and up", run(x, gate_up, first, gate=True)
    yield "down", run(inside, down, residual=x)


def sums_of_ranks(arch: int) -> Iterator[Case]:
    """Sums over 2, 4 and 8 ranks, with a residual and without; in two steps over 4 and 8."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for world, way in (
            (2, one_shot_reduce),
            (4, one_shot_reduce),
            (8, one_shot_reduce),
            (4, two_shot_reduce),
            (8, two_shot_reduce),
        ):
            tables = [torch.empty(world, dtype=torch.int64) for _ in range(2)]
            room = one_shot_reduce.PeerBuffers(1, world, *tables, torch.empty(256, dtype=torch.int32), way.MOST)
            x = torch.empty(ROWS, 8192, dtype=dtype)
            for residual in (None, x):

                def run(
                    x: Tensor = x,
                    room: one_shot_reduce.PeerBuffers = room,
                    residual: Tensor | None = residual,
                    way: Any = way,
                ) -> None:
                    way.all_reduce(x, room, residual)

                name = f"{str(dtype).removeprefix('torch.')}, {world} ranks" + ", two steps" * (way is two_shot_reduce)
                yield name if residual is None else f"{name} and residual", run


def attention(d: int, dtype: torch.dtype, extra: str, verify: bool = False) -> Callable[[], None]:
    def run() -> None:
        heads, groups, parts = 14, 2, 64
        gated, sinks = extra == "gates", torch.empty(heads) if extra == "sinks" else None
        qkv = torch.empty(ROWS, (heads * (1 + gated) + 2 * groups) * d, dtype=dtype)
        factors = torch.empty(ROWS, d)
        cache = LayerKV(*(torch.empty(4, BLOCK, groups, d, dtype=dtype) for _ in range(2)))
        sizes = (ROWS + 2, ROWS + 1, 64, ROWS, ROWS + 2, *(parts,) * 5, parts // 2, parts // 2, parts // 2 + 1)
        ints = [torch.empty(n, dtype=torch.int64 if i == 3 else torch.int32) for i, n in enumerate(sizes)]
        norms = (
            fused_decode_attention.HeadNorms(factors[0].to(dtype), factors[1].to(dtype), 1e-6)
            if extra in ("norms", "gates")
            else None
        )
        window = WINDOW if extra == "window" else 0
        form = fused_decode_attention.AttentionForm(0.1, window, norms, gated, sinks)
        turned = Rotary(factors, factors)
        if verify:
            fused_verify_attention.attend(qkv, turned, cache, ItemAttn(*ints), form)
        else:
            fused_decode_attention.attend(qkv, turned, cache, SingleAttn(*ints), form)

    return run
