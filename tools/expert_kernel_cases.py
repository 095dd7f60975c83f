"""Launches of experts at serving sizes, in the engine's dtype and by codes, for ``tools.kernel_cases``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tools.row_kernel_cases import DTYPES, SCHEMES, Case, ints
from trencadis.backends.cuda.kernels import fused_moe, quantised_fused_moe, tile_sizes
from trencadis.backends.cuda.kernels.activation import KINDS
from trencadis.backends.cuda.kernels.quantised_fused_moe import PairTiles
from trencadis.backends.cuda.kernels.tile_sizes import Tile
from trencadis.backends.cuda.weights.quantised_weight import FP4
from trencadis.backends.cuda.weights.stacked_experts import StackedCodes, StackedExperts, stack_experts
from trencadis.core.device.backend import ExpertBiases
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

EXPERTS, TOP, COLUMNS, WIDTH = 128, 8, 768, 2048
"""Those of Qwen3-30B-A3B."""


def experts(arch: int) -> Iterator[Case]:
    """Every line of ``tiles/experts.csv`` in each type, few pairs, many, and those of prompts; the launches of a
    layer.
    """
    for dtype in DTYPES:
        held = StackedExperts(
            torch.empty(EXPERTS, 2 * COLUMNS, WIDTH, dtype=dtype), torch.empty(EXPERTS, WIDTH, COLUMNS, dtype=dtype),
            EXPERTS, COLUMNS,
        )  # fmt: skip
        for label, count in _tokens(EXPERTS, TOP, dtype).items():
            x, scores = torch.empty(count, WIDTH, dtype=dtype), torch.empty(count, EXPERTS, dtype=dtype)
            for normalise, kind in ((True, "silu"), (False, "gelu_tanh"))[: 2 if label == "few" else 1]:
                name = f"{str(dtype).removeprefix('torch.')} {kind}, {label}"

                def run(x: Tensor = x, s: Tensor = scores, w: Any = held, n: bool = normalise, k: str = kind) -> None:
                    fused_moe.run(x, s, w, TOP, n, k)

                yield name, run
    for count, experts, top in ((16, 256, 8), (1, 128, 8), (8, 512, 10)):
        scores = torch.empty(count, experts, dtype=torch.bfloat16)
        yield f"routes of {count} tokens to {experts} experts", lambda s=scores, t=top: route(s, t)
    yield from _experts_without_gates()


PLAIN, PLAIN_TOP, PLAIN_COLUMNS, PLAIN_WIDTH = 128, 6, 1856, 2688
"""Those of Nemotron-3 Nano."""


def route(scores: Tensor, top: int) -> None:
    """Routes few tokens, whose tiles have 16 pairs."""
    fused_moe.route_tokens(scores, top, True, 16)


def _tokens(experts: int, top: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns tokens of each class of tiles; float32 has the same for many pairs and for prompts."""
    found = {"few": 4, "many": 2 * experts * fused_moe.FEW // top, "prompt": 2 * experts * fused_moe.MANY // top}
    return {label: count for label, count in found.items() if label != "prompt" or dtype.itemsize == 2}


def _experts_without_gates() -> Iterator[Case]:
    """Yields the launches of a layer in bfloat16, of each class."""
    w = StackedExperts(
        torch.empty(PLAIN, PLAIN_COLUMNS, PLAIN_WIDTH, dtype=torch.bfloat16),
        torch.empty(PLAIN, PLAIN_WIDTH, PLAIN_COLUMNS, dtype=torch.bfloat16), PLAIN, PLAIN_COLUMNS,
    )  # fmt: skip
    for label, count in _tokens(PLAIN, PLAIN_TOP, torch.bfloat16).items():
        x, scores = torch.empty(count, PLAIN_WIDTH, dtype=torch.bfloat16), torch.empty(count, PLAIN)

        def run(x: Tensor = x, s: Tensor = scores) -> None:
            fused_moe.run(x, s, w, PLAIN_TOP, True, "relu2")

        yield f"bfloat16 relu2 without gates, {label}", run


CODED_EXPERTS, CODED_TOP, CODED_COLUMNS, CODED_WIDTH = 8, 2, 256, 512
"""Few, since only types and remainders matter to a compiler."""

CODED = {
    **SCHEMES,
    "mxfp4": Scheme(8, group=32, fp4=True),
    "int4 in an order of its own": Scheme(4, group=128, ordered=True),
    "fp8 in blocks of 128": Scheme(8, "float", group=128, block=128, activations="none"),
}


def coded_experts(arch: int) -> Iterator[Case]:
    """Every line of ``tiles/coded_experts.csv``: each kind of codes in bfloat16, some in the other types; few pairs,
    many, and those of prompts where an architecture has tiles for them.
    """
    tile_sizes.INTERPRETED = arch
    tile_sizes.find.cache_clear()
    tile_sizes.arch_of.cache_clear()
    taken = {torch.bfloat16: list(CODED), torch.float16: ["int4, groups of 128, zero points", "fp8", "mxfp4"],
             torch.float32: ["int8", "mxfp4"]}  # fmt: skip
    for dtype, label in ((dtype, label) for dtype, labels in taken.items() for label in labels):
        w = _coded(CODED[label], dtype, arch)
        own = _tiles(w, dtype, "many") != _tiles(w, dtype, "prompt")
        for length in ("few", "many", "prompt")[: 2 + own]:
            yield (
                f"{str(dtype).removeprefix('torch.')} {label}, {length}",
                lambda w=w, d=dtype, n=length: _multiply(w, d, n),
            )


def _tiles(w: StackedExperts, dtype: torch.dtype, length: str) -> tuple[Tile, Tile]:
    """Returns the tiles of both products."""
    x = torch.empty(0, dtype=dtype)
    return fused_moe.tile_of(x, w.gate_up, length, True), fused_moe.tile_of(x, w.down, length, False)


def _multiply(w: StackedExperts, dtype: torch.dtype, length: str) -> None:
    """Launches both products, without the routing, which is that of other experts."""
    assert isinstance(w.gate_up, StackedCodes) and isinstance(w.down, StackedCodes)
    x = torch.empty(16, CODED_WIDTH, dtype=dtype)
    tile, last = _tiles(w, dtype, length)
    pairs = PairTiles(ints(CODED_EXPERTS * tile.m), ints(CODED_EXPERTS), CODED_TOP)
    act = KINDS["clamped_swiglu" if w.gate_up.kind == FP4 else "silu"]
    between = quantised_fused_moe.multiply_up(x, w.gate_up, w.gate_up_bias, pairs, w.inner, act, tile)
    shares = torch.empty(16, CODED_TOP)
    quantised_fused_moe.multiply_down(between, w.down, w.down_bias, pairs._replace(top=1), shares, last)


def _coded(scheme: Scheme, dtype: torch.dtype, arch: int) -> StackedExperts:
    sides = []
    for rows, columns in ((2 * CODED_COLUMNS, CODED_WIDTH), (CODED_WIDTH, CODED_COLUMNS)):
        codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn if scheme.kind == "float" else torch.int8)
        group = scheme.group or columns
        order = torch.arange(columns).int().flip(0) // group if scheme.ordered else None
        scale = torch.ones(rows, columns // group)
        sides.append([QTensor(scheme, codes, scale, None, group, order, dtype)] * CODED_EXPERTS)
    biases = None
    if scheme.fp4:  # as gpt-oss has them
        widths = 2 * CODED_COLUMNS, CODED_WIDTH
        biases = ExpertBiases(*([torch.empty(n, dtype=dtype)] * CODED_EXPERTS for n in widths))
    return stack_experts(sides[0], sides[1], biases, arch)
