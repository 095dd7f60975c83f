"""Reads AWQ files in GEMM order: codes [in, out / 8], each word holding eight output features of one input column."""

from __future__ import annotations

import torch

from trencadis.core.checkpoint.formats.bit_packing import signed, unpack_words
from trencadis.core.checkpoint.formats.raw_weight import RawWeight
from trencadis.core.quant.quantised_tensor import QTensor

NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within the word of each of eight consecutive output features: even ones first."""


def read(raw: RawWeight) -> QTensor:
    """Reads a weight with a zero point for each group."""
    (rows, columns), groups = raw.shape, raw.groups()
    if rows % 8:
        raw.refuse(f"has {rows} output features; AWQ packs them by eight")
    words = raw.need("qweight", (columns, rows // 8), torch.int32)
    zeros = raw.need("qzeros", (groups, rows // 8), torch.int32)
    scales = raw.need("scales", (groups, rows), torch.float16, torch.bfloat16, torch.float32)
    data = signed(unpack_words(words, 4, 1, NIBBLE_ORDER), 4).t().contiguous()
    zero = signed(unpack_words(zeros, 4, 1, NIBBLE_ORDER), 4).t().contiguous()
    return raw.make_qtensor(data, raw.scales(scales, "scales").t().contiguous(), zero, None)
