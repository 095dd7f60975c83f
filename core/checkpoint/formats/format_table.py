"""The reader of each format, by its name in ``core.checkpoint.quant_config``."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.core.checkpoint.formats import awq, compressed_tensors, fp8, gptq, mxfp4
from trencadis.core.checkpoint.formats.raw_weight import RawWeight
from trencadis.core.quant.quantised_tensor import QTensor

READERS: dict[str, Callable[[RawWeight], QTensor]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "awq": awq.read,
    "gptq": gptq.read_v1,
    "gptq_v2": gptq.read_v2,
    "mxfp4": mxfp4.read,
}

MARKS = {
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "gptq_v2": ("qweight",),
    "mxfp4": ("blocks",),
}
"""Tensor suffixes that identify a quantised weight in each format; it has at least one of them."""
