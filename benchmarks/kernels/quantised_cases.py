"""Products with quantised weights at the sizes of Qwen2.5-VL-3B and 7B, against cuBLAS in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.layers import quantise_blocks
from benchmarks.kernels.case import Case
from trencadis.backends.cuda.kernels import block_scaled_linear, quantised_linear, tile_sizes
from trencadis.backends.cuda.weights.quantised_weight import dequantise, pack_quantised_weight, product
from trencadis.core.quant import online_quant
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme

SHAPES = ((2560, 2048), (2048, 11008), (37888, 3584), (3584, 18944))
"""Output and input features."""

SCHEMES = {
    "int8": Scheme(8), "int8 by int8": Scheme(8, activations="token"), "fp8": Scheme(8, "float"),
    "fp8 by fp8": Scheme(8, "float", activations="token"), "int4": Scheme(4, group=128),
    "fp8 in blocks": block_scaled_linear.SCHEME,
}  # fmt: skip


def case(
    label: str, scheme: Scheme, rows: int, shape: tuple[int, int], device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:  # fmt: skip
    """One product of ``rows`` rows: few are judged by the bytes that they read."""
    out, inputs = shape
    dense = torch.randn(out, inputs, dtype=dtype, device=device) / inputs**0.5
    quantise = quantise_blocks if scheme.block > 1 else online_quant.quantise
    by_blocks = scheme.block > 1 and block_scaled_linear.possible(device)
    w = pack_quantised_weight(quantise(dense, scheme, dtype), None, tile_sizes.arch_of(device), by_blocks)
    x = torch.randn(rows, inputs, dtype=dtype, device=device)

    def run() -> Tensor:
        return quantised_linear.linear(x, w)

    def check() -> float:
        return float((run().float() - product(x, w, dequantise(w)).float()).abs().max())

    few = rows <= quantised_linear.FEW
    return Case(
        f"quantised {label}, {rows} rows, {out} x {inputs}", "quantised", run,
        bytes=w.nbytes + x.nbytes + dtype.itemsize * rows * out, flops=2 * rows * out * inputs,
        bound="read" if few else "flops",
        baselines={"cuBLAS": lambda: functional.linear(x, dense)}, check=check,
    )  # fmt: skip


def cases(device: torch.device, small: bool = False) -> Iterator[Case]:
    """Decoding and prefill; ``small``: sizes that an interpreter can run. Where the card's product of blocks is not
    proven, a line says so, and the rows of 16 bits that are multiplied instead are measured.
    """
    block_scaled_linear.try_product(device, torch.bfloat16)
    for label, scheme in SCHEMES.items():
        for shape in ((128, 256),) if small else SHAPES:
            for rows in (3,) if small else (1, 8, 64, 4096):
                yield case(label, scheme, rows, shape, device)
