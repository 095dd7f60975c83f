"""The launches to compile: one per entry of each tile table, at the head sizes that fill it.

A case is (name, a function that makes the launch on CPU tensors); it is recorded, not run (``tools.kernel_resources``).
``CASES[group](arch)`` yields those of one architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools import expert_kernel_cases, recurrent_kernel_cases, row_kernel_cases
from tools.compiled import layer_cases
from trencadis.backends.cuda.kernels import (
    cross_attend,
    paged_attention,
    quantised_kv_attention,
    rotary_kernels,
    tile_sizes,
    vision_attention,
)
from trencadis.backends.cuda.kernels.attention_metadata import (
    CrossAttentionItems,
    CudaSegments,
    ItemAttn,
    SingleAttn,
    SingleCrossAttention,
)
from trencadis.backends.cuda.kernels.query_blocks_and_key_cuts import DRAWN, FEW, MANY, READ
from trencadis.core.device.backend import LayerKV

Case = tuple[str, Callable[[], None]]
DTYPES = {16: (torch.bfloat16, torch.float16), 32: (torch.float32,)}
GROUP, GROUPS, BLOCK = 7, 2, 16
TUNED = (64, 80, 128)
WINDOW = 1024


def entries(kernel: str, arch: int) -> Iterator[tuple[tile_sizes.TileEntry, int, torch.dtype]]:
    """(entry, head size, dtype): every entry at the largest head it serves, and at the tuned ones."""
    tile_sizes.INTERPRETED = arch
    tile_sizes.find.cache_clear()
    tile_sizes.arch_of.cache_clear()
    lines = tile_sizes.entries(kernel, arch)
    for e in lines:
        smaller = max((o.head for o in lines if o[:2] == e[:2] and o.length == e.length and o.head < e.head), default=0)
        for head in dict.fromkeys([*(h for h in TUNED if smaller < h < e.head), e.head]):
            for dtype in DTYPES[e.bits]:
                yield e, head, dtype


def windowed(dtype: torch.dtype, head: int) -> bool:
    """Whether a case is compiled with a window, too, and prefill with tokens that see beyond their own place."""
    return dtype == torch.bfloat16 and head in (128, 256)


def name(dtype: torch.dtype, head: int, *more: str) -> str:
    return " ".join([str(dtype).removeprefix("torch."), f"head {head}", *(m for m in more if m != "any")])


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def qkv(tokens: int, heads: int, groups: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v [tokens, heads, d] side by side, as a fused projection leaves them."""
    fused = torch.zeros(tokens, (heads + 2 * groups) * d, dtype=dtype)
    return [t.view(tokens, -1, d) for t in torch.split(fused, [heads * d, groups * d, groups * d], dim=1)]


def cache(d: int, dtype: torch.dtype, block: int) -> list[Tensor]:
    return [torch.zeros(4, block, GROUPS, d, dtype=dtype) for _ in range(2)]


def coded(d: int, dtype: torch.dtype, block: int, codes: torch.dtype) -> LayerKV:
    """An 8-bit cache whose keys have a bias."""
    k, v = cache(d, codes, block)
    scales = [torch.zeros(4, block, GROUPS, dtype=torch.float16) for _ in range(2)]
    kept = torch.zeros(4, block, GROUPS, 8, dtype=torch.float16 if dtype == torch.float32 else dtype)
    return LayerKV(k, v, scales[0], scales[1], kept, ints(GROUPS, 8))


def items(single: bool, tokens: int, upto: bool = False) -> ItemAttn:
    """What a launch of 16 rows hands to the kernels."""
    rows, parts = 16, 64
    lists = (ints(rows + 2), ints(rows + 1), ints(64), ints(tokens, dtype=torch.int64), ints(rows + 2))
    kind = SingleAttn if single else ItemAttn
    planned = [ints(n) for n in (*(parts,) * 5, parts // 2, parts // 2, parts // 2 + 1)]
    return kind(*lists, *planned, ints(tokens) if upto else None)


def attended(q: Tensor, kv: LayerKV, attn: ItemAttn, window: int = 0, alike: bool = False) -> None:
    room = paged_attention.partial(attn, q, kv, alike)
    paged_attention.attend_text(q, kv, attn, 0.1, torch.empty_like(q), room, alike, window)


def text(kernel: str) -> Callable[[int], Iterator[Case]]:
    """Every tile over a cache of 16 or 32 bits; short blocks also as ``--batch-invariant`` has them."""

    def cases(arch: int) -> Iterator[Case]:
        single = kernel == "attend_decode"
        plain = {e.head for e in tile_sizes.entries(kernel, arch) if e.length == "plain"}
        for e, d, dtype in entries(kernel, arch):
            if e.length == "plain":  # the tile of long launches over blocks of 16, below
                continue
            tokens = {"any": 16, "short": 64}.get(e.length, 2 * MANY)

            def run(
                d: int = d, dtype: torch.dtype = dtype, tokens: int = tokens, block: int = 16, **options: Any
            ) -> None:
                q, held = torch.zeros(tokens, GROUP * GROUPS, d, dtype=dtype), LayerKV(*cache(d, dtype, block))
                attended(q, held, items(single, tokens, "window" in options and not single), **options)

            yield name(dtype, d, e.length, "block 16"), run
            if e.length != "short" and (dtype == torch.bfloat16 or d in plain):
                yield name(dtype, d, e.length, "block 128"), partial(run, block=128)
            if windowed(dtype, d):
                yield name(dtype, d, e.length, f"window {WINDOW}"), partial(run, window=WINDOW)
            if e.length == "short":
                yield name(dtype, d, e.length, "alike"), partial(run, alike=True)
                if dtype != torch.float16:
                    yield name(dtype, d, e.length, f"{2 * FEW} tokens"), partial(run, tokens=2 * FEW)

    return cases


def over_codes(kernel: str) -> Callable[[int], Iterator[Case]]:
    """Attention over int8 and fp8 codes: every tile at the head sizes of ``entries``, blocks of 16."""

    def cases(arch: int) -> Iterator[Case]:
        single = kernel == "attend_decode_codes"
        for e, d, dtype in entries(kernel, arch):
            for codes in (torch.int8, torch.uint8):
                tokens = {"any": 16, "short": 64}.get(e.length, 2 * MANY)

                def run(d: int = d, dtype: torch.dtype = dtype, n: int = tokens, codes: torch.dtype = codes) -> None:
                    q, held = torch.zeros(n, GROUP * GROUPS, d, dtype=dtype), coded(d, dtype, BLOCK, codes)
                    attended(q, held, items(single, n))

                yield name(dtype, d, e.length, "int8" if codes == torch.int8 else "fp8"), run

    return cases


def looked(single: bool, d: int, dtype: torch.dtype) -> None:
    """Attention to images of a launch of 16 tokens, over rows of an arena that hold two layers."""
    tokens, parts = 16, 64
    items = -(-tokens // max((DRAWN if single else READ) // GROUP, 1)) + parts
    seen = (SingleCrossAttention if single else CrossAttentionItems)(
        ints(4), ints(tokens, 4), ints(tokens, 4), ints(tokens), ints(4), *(ints(items) for _ in range(5)),
        ints(parts // 2), ints(parts // 2 + 1),
    )  # fmt: skip
    q, arena = torch.zeros(tokens, GROUP * GROUPS, d, dtype=dtype), torch.zeros(64, 4 * GROUPS * d, dtype=dtype)
    k, v = torch.split(arena[:, : 2 * GROUPS * d], GROUPS * d, dim=1)
    cross_attend.cross_attend(q, k, v, seen, 0.1, torch.empty_like(q), cross_attend.span_results(seen, q, GROUPS))


def cross_attention(arch: int) -> Iterator[Case]:
    """Every tile, in launches of one token a row and of several."""
    for e, d, dtype in entries("attend_pictures", arch):
        yield name(dtype, d, e.length), partial(looked, e.length == "one", d, dtype)


def stored_codes(arch: int) -> Iterator[Case]:
    for d in (80, 128):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for codes in (torch.int8, torch.uint8):

                def run(d: int = d, dtype: torch.dtype = dtype, codes: torch.dtype = codes) -> None:
                    _, k, v = qkv(16, GROUP * GROUPS, GROUPS, d, dtype)
                    quantised_kv_attention.store(k, v, coded(d, dtype, BLOCK, codes), ints(16, dtype=torch.int64))

                yield name(dtype, d, "int8" if codes == torch.int8 else "fp8"), run


def vision(kernel: str, launch: Callable[..., None]) -> Callable[[int], Iterator[Case]]:
    def cases(arch: int) -> Iterator[Case]:
        for e, d, dtype in entries(kernel, arch):
            slots = 512 if e.length == "short" else 2048
            seg = CudaSegments(*(ints(slots // 64) for _ in CudaSegments._fields))

            def run(d: int = d, dtype: torch.dtype = dtype, slots: int = slots, seg: Any = seg) -> None:
                q, k, v = qkv(slots, 16, 16, d, dtype)
                launch(q, k, v, seg, 0.1, torch.empty(slots, 16, d, dtype=dtype))

            yield name(dtype, d, e.length), run

    return cases


def rotary(arch: int) -> Iterator[Case]:
    for d in (80, 128):
        factors = [torch.zeros(16, d) for _ in range(2)]
        half = (torch.zeros(d // 2), ints(d // 2, dtype=torch.int64))
        yield f"head {d}", lambda d=d, f=factors, h=half: rotary_kernels.rotary(ints(3, 16), *h, *f)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):

            def store(d: int = d, dtype: torch.dtype = dtype, factors: list[Tensor] = factors) -> None:
                q, k, v = qkv(16, GROUP * GROUPS, GROUPS, d, dtype)
                rotary_kernels.rope_store(q, k, v, *factors, *cache(d, dtype, BLOCK), ints(16, dtype=torch.int64), q)

            def plain(d: int = d, dtype: torch.dtype = dtype, factors: list[Tensor] = factors) -> None:
                q, k, _ = qkv(16, 16, 16, d, dtype)
                rotary_kernels.rope_vision(q, k, *factors, q, k)

            yield name(dtype, d, "store"), store
            yield name(dtype, d, "vision"), plain


CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    "attend_prefill": text("attend_prefill"),
    "attend_decode": text("attend_decode"),
    "attend_prefill_codes": over_codes("attend_prefill_codes"),
    "attend_decode_codes": over_codes("attend_decode_codes"),
    "attend_pictures": cross_attention,
    "kv_codes": stored_codes,
    "layers": layer_cases.layers,
    "peers": layer_cases.sums_of_ranks,
    "attend_windows": vision("attend_windows", vision_attention.attend_windows),
    "attend_images": vision("attend_images", vision_attention.attend_images),
    "rope": rotary,
    "small": row_kernel_cases.small,
    "head": row_kernel_cases.sampling,
    "recurrent": recurrent_kernel_cases.recurrent,
    "quantised": row_kernel_cases.products,
    "experts": expert_kernel_cases.experts,
    "coded_experts": expert_kernel_cases.coded_experts,
}
