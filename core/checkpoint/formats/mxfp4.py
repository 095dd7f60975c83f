"""Reads MXFP4 files: blocks of 32 values of 4 bits (e2m1) that share a power of two (e8m0)."""

from __future__ import annotations

import torch

from trencadis.core.checkpoint.formats.raw_weight import RawWeight
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.scheme import HALVES

BLOCK = 32
"""Values of a block, and the group of the scheme; two values share a byte, the first one in its low half."""

BIAS = 127
"""What is subtracted from a stored exponent."""


def read(raw: RawWeight) -> QTensor:
    """Reads a weight [out, in] of ``blocks`` [out, in / 32, 16], or [out, in / 2], and ``scales`` [out, in / 32], both
    uint8. Its integers are twice the values, so that nothing is rounded.
    """
    out, groups = raw.shape[0], raw.groups()
    found = raw.get("blocks")
    flat = found is not None and found.ndim == 2
    shape = (out, groups * BLOCK // 2) if flat else (out, groups, BLOCK // 2)
    blocks = raw.need("blocks", shape, torch.uint8)
    exponents = raw.need("scales", (out, groups), torch.uint8)
    if bool((exponents == 255).any()):
        raw.refuse("has a scale of NaN in .scales")
    table = torch.tensor(HALVES, dtype=torch.int8)
    codes = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1).view(raw.shape)
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - (BIAS + 1))
    return raw.make_qtensor(codes, scale, None, None)
