"""Reads compressed-tensors: ``float-quantized``, ``int-quantized`` (and ``naive-quantized``), ``pack-quantized``.

A value is (code - zero) * scale. Packed codes and packed zero points have the middle of their range added. The codes of
a word are adjacent in a row, its zero points adjacent in a column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.checkpoint.formats.bit_packing import signed, unpack_words
from trencadis.core.checkpoint.formats.raw_weight import RawWeight
from trencadis.core.quant.quantised_tensor import QTensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.bfloat16, torch.float16, torch.float32)


def read(raw: RawWeight) -> QTensor:
    """Reads a weight in the layout that its tensors indicate."""
    if raw.get("weight_packed") is not None:
        return _read_packed(raw)
    kinds = FLOAT8 if raw.scheme.kind == "float" else (torch.int8,)
    data = raw.need("weight", raw.shape, *kinds)
    scale = scale_of(raw, "weight_scale")
    zero = raw.get("weight_zero_point")
    if raw.scheme.symmetric or raw.scheme.kind == "float" or zero is None:
        zero = None
    else:
        zero = _spread(raw, zero, "weight_zero_point").to(torch.int8)
    return raw.make_qtensor(data, scale, zero, raw.order(raw.get("weight_g_idx"), scale.shape[1], "weight_g_idx"))


def scale_of(raw: RawWeight, suffix: str) -> Tensor:
    """Returns float32 [out, groups] from scales stored per matrix, row, group or block."""
    found = raw.get(suffix)
    if found is None:
        raw.need(suffix, ())
    assert found is not None
    if found.dtype not in SCALES:
        raw.refuse(f"has {found.dtype} in .{suffix}; it must be {' or '.join(map(str, SCALES))}")
    return _spread(raw, raw.scales(found, suffix), suffix)


def _spread(raw: RawWeight, found: Tensor, suffix: str) -> Tensor:
    """Returns [out, groups] from values stored per matrix, row, group or block."""
    (rows, columns), scheme = raw.shape, raw.scheme
    if scheme.block == 0:
        if found.numel() != 1:
            raw.check(suffix, found, (1,))
        return found.reshape(1, 1).expand(rows, 1)
    if scheme.block > 1:
        wanted = -(-rows // scheme.block), -(-columns // scheme.group)
        return raw.check(suffix, found, wanted).repeat_interleave(scheme.block, 0)[:rows]
    found = found.reshape(-1, 1) if found.ndim == 1 and not scheme.group else found
    return raw.check(suffix, found, (rows, raw.groups()))


def _read_packed(raw: RawWeight) -> QTensor:
    (rows, columns), bits = raw.shape, raw.scheme.bits
    each = 32 // bits
    words = raw.need("weight_packed", (rows, -(-columns // each)), torch.int32)
    stated = raw.get("weight_shape")
    if stated is not None and stated.tolist() != [rows, columns]:
        raw.refuse(f"has shape {stated.tolist()} in .weight_shape, config.json asks {[rows, columns]}")
    data = signed(unpack_words(words, bits, 1)[:, :columns], bits)
    scale = scale_of(raw, "weight_scale")
    zero = None if raw.scheme.symmetric else raw.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        raw.check("weight_zero_point", zero, (-(-rows // each), scale.shape[1]))
        zero = signed(unpack_words(zero, bits, 0)[:rows], bits)
    elif zero is not None:  # older files hold them unpacked
        zero = raw.check("weight_zero_point", zero, (rows, scale.shape[1]), torch.int8)
    return raw.make_qtensor(data, scale, zero, raw.order(raw.get("weight_g_idx"), scale.shape[1], "weight_g_idx"))
