"""Products of 8-bit floats by 8-bit floats with a scale for each 128 x 128 block of the weight and each 128 columns of
a token, as FP8 checkpoints with ``weight_block_size`` ask for.

The product is cuBLAS', by torch's ``scaled_mm``: on sm_90, with CUDA 12.9 or newer. It wants the scales of tokens
column by column, as many rows as a multiple of four, and those of blocks in columns that are filled up to a multiple of
four; other layouts have given wrong values silently. So ``prove`` compares it with plain products at the start, and no
weight is packed for it unless they agree. ``use_fast_accum`` stays off: each 128 columns are added in float32 anyway.

Activations are rounded for every number of rows, so that a token does not depend on how its prompt was cut. Up to
``VALUES_ROWS`` rows, codes times their scales are multiplied by the kernels of other weights, which decode it once.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.backends.cuda.kernels import tile_sizes
from trencadis.backends.cuda.kernels.activation_rounding import RoundedRows, Rounding, round_to
from trencadis.backends.cuda.weights.quantised_weight import (
    E4M3,
    QuantisedWeight,
    dequantise,
    pack_quantised_weight,
)
from trencadis.core import envs
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import BLOCK_SIZE, Scheme

log = logging.getLogger("trencadis.engine")

VALUES_ROWS = 64
"""Maximum rows that other products multiply: one tile of rows, which decodes each weight once."""

HOPPER = 90
"""Compute capability x 10 of the cards that have the product."""

SCHEME = Scheme(8, "float", group=BLOCK_SIZE, block=BLOCK_SIZE, activations="token")

PROOF_ROWS = (65, 128, 259)
"""Rows of the products that are compared: not all are multiples of four."""

PROOF_SIZE = 384 + 16, 5 * BLOCK_SIZE
"""(output features, columns) of their weight: a part of a block, and columns of blocks that must be filled up."""

CLOSE, ROUNDED = 0.01, 0.05
"""Largest share of a row's norm by which a product may be away from the plain one of the same codes, and from that of
activations that were not rounded, which codes cost 2.6 to 3 % of.
"""


class _Proof:
    """Whether ``prove`` has found the product right in this process."""

    passed = False


@cache
def is_wanted() -> bool:
    """Returns True unless TRENCADIS_CUDA_BLOCK_PRODUCTS=0."""
    return envs.get_bool("TRENCADIS_CUDA_BLOCK_PRODUCTS")


def possible(device: torch.device) -> bool:
    """Returns True if ``prove`` found the product right on this card; for estimates, over tensors without memory, if
    this torch has it.
    """
    return is_wanted() and (is_present() if device.type == "meta" else _Proof.passed)


@cache
def try_product(device: torch.device, dtype: torch.dtype) -> None:
    """Proves the product once, before the first weight in blocks is packed, and logs a line if it is not used."""
    if device.type != "meta" and (note := prove(device, dtype)):
        log.warning("%s", note)


def is_present() -> bool:
    """Returns True if this torch has products with scales of blocks."""
    return hasattr(functional, "scaled_mm") and hasattr(functional, "ScalingType")


def choose_rounding(rows: int, dtype: torch.dtype) -> Rounding:
    """Returns how the activations of a product of ``rows`` rows are rounded."""
    if rows <= VALUES_ROWS:
        return Rounding(E4M3, dtype, BLOCK_SIZE, values=True)
    return Rounding(E4M3, torch.float8_e4m3fn, BLOCK_SIZE)


def multiply(x: RoundedRows, w: QuantisedWeight) -> Tensor:
    """Multiplies [n, in] -> [n, out] in ``x``'s dtype by a weight that has ``blocks``."""
    assert w.blocks is not None
    out = functional.scaled_mm(
        x.codes,
        w.codes.view(torch.float8_e4m3fn).t(),
        x.scale.t(),
        functional.ScalingType.BlockWise1x128,
        w.blocks.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )
    out = out[: x.rows]
    return out if w.bias is None else out.add_(w.bias)


def prove(device: torch.device, dtype: torch.dtype) -> str:
    """Compares products of drawn codes, each block with a scale of its own, with plain ones. Returns the note for the
    start if they disagree or the card has none, and an empty string if they agree; only then is the product used.
    """
    _Proof.passed = False
    if not is_wanted() or dtype.itemsize != 2:
        return ""
    try:
        why = _find_fault(device, dtype)
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
    _Proof.passed = not why
    if not why:
        return ""
    return (
        f"no products of fp8 in blocks here ({why}): activations stay in 16 bits, and prompts decode each weight first"
    )


def _find_fault(device: torch.device, dtype: torch.dtype) -> str:
    """Returns what is wrong with the product; an empty string if nothing is."""
    if not is_present():
        return f"torch {torch.__version__} has none"
    arch = tile_sizes.arch_of(device)
    if arch != HOPPER:
        return f"sm_{arch}; cuBLAS has them for sm_{HOPPER}"
    drawn = torch.Generator().manual_seed(1)
    rows, columns = PROOF_SIZE
    codes = torch.randn(rows, columns, generator=drawn).to(torch.float8_e4m3fn)
    blocks = torch.rand(-(-rows // BLOCK_SIZE), columns // BLOCK_SIZE, generator=drawn) * 4 + 0.25
    scale = blocks.repeat_interleave(BLOCK_SIZE, 0)[:rows]
    q = QTensor(SCHEME, codes, scale, None, BLOCK_SIZE, None, dtype).moved(device)
    w = pack_quantised_weight(q, torch.randn(rows, generator=drawn).to(device, dtype), HOPPER, by_blocks=True)
    values = q.dequantised()
    if float((dequantise(w) - values).abs().max()) > 1e-3 * float(values.abs().max()):
        return "a weight's codes are not decoded as they were packed"
    for count in PROOF_ROWS:
        sizes = torch.rand(count, columns // BLOCK_SIZE, generator=drawn) * 4 + 0.25
        x = torch.randn(count, columns, generator=drawn) * sizes.repeat_interleave(BLOCK_SIZE, 1)
        x = x.to(device, dtype)
        rounded = round_to(x, choose_rounding(count, dtype))
        scales = rounded.scale.t()[:count].repeat_interleave(BLOCK_SIZE, 1)
        got = multiply(rounded, w).float()
        for told, source, most in (
            ("of the same codes", rounded.codes[:count].float() * scales, CLOSE), ("unrounded", x.float(), ROUNDED),
        ):  # fmt: skip
            want = functional.linear(source, values, None if w.bias is None else w.bias.float())
            away = float(((got - want).norm(dim=1) / want.norm(dim=1)).nan_to_num(9.9).max())
            if away > most:
                return f"{away:.1%} from a plain product, {told}, with {count} rows"
    return ""
