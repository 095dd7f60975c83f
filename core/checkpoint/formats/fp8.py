"""Reads ``fp8`` files: 8-bit values with ``weight_scale_inv`` for each block, or one ``weight_scale``.

Both are factors by which a stored value is multiplied, in spite of the name.
"""

from __future__ import annotations

from dataclasses import replace

from trencadis.core.checkpoint.formats.compressed_tensors import FLOAT8, scale_of
from trencadis.core.checkpoint.formats.raw_weight import RawWeight
from trencadis.core.quant.quantised_tensor import QTensor


def read(raw: RawWeight) -> QTensor:
    """Reads a weight with scales laid out as in the scheme, or one per row if there are as many scales as rows."""
    data = raw.need("weight", raw.shape, *FLOAT8)
    suffix = "weight_scale_inv" if raw.get("weight_scale_inv") is not None else "weight_scale"
    found = raw.get(suffix)
    if found is not None and found.numel() == raw.shape[0] > 1 and raw.scheme.block == 0:
        raw = replace(raw, scheme=replace(raw.scheme, block=1))
    return raw.make_qtensor(data, scale_of(raw, suffix), None, None)
