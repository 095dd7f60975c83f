"""Reads GPTQ files: codes [in / (32 / bits), out], each word holding consecutive input columns of one output feature.

Zero points are packed along the output. The first version of the format stores them minus one.
"""

from __future__ import annotations

import torch

from trencadis.core.checkpoint.formats.bit_packing import signed, unpack_words
from trencadis.core.checkpoint.formats.raw_weight import RawWeight
from trencadis.core.quant.quantised_tensor import QTensor


def read_v1(raw: RawWeight) -> QTensor:
    """Reads a weight whose zero points are stored minus one (modulo the range)."""
    return _read(raw, 1)


def read_v2(raw: RawWeight) -> QTensor:
    """Reads a weight whose zero points are stored unchanged."""
    return _read(raw, 0)


def _read(raw: RawWeight, missing: int) -> QTensor:
    (rows, columns), bits = raw.shape, raw.scheme.bits
    each, groups = 32 // bits, raw.groups()
    if columns % each or rows % each:
        raw.refuse(f"is {rows} x {columns}; GPTQ packs both by {each}")
    words = raw.need("qweight", (columns // each, rows), torch.int32)
    zeros = raw.need("qzeros", (groups, rows // each), torch.int32)
    scales = raw.need("scales", (groups, rows), torch.float16, torch.bfloat16, torch.float32)
    zero = (unpack_words(zeros, bits, 1) + missing) & ((1 << bits) - 1)
    data = signed(unpack_words(words, bits, 0), bits).t().contiguous()
    order = raw.order(raw.get("g_idx"), groups, "g_idx")
    return raw.make_qtensor(
        data, raw.scales(scales, "scales").t().contiguous(), signed(zero, bits).t().contiguous(), order
    )
