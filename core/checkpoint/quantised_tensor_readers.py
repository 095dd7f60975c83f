"""Readers that convert the stored tensors of one weight to a ``QTensor``, one for each stored format.

Words of 32 bits hold integers of 4 and 8 bits, the first integer in the lowest bits. In compressed-tensors
(``float-quantized``, ``int-quantized`` and ``naive-quantized``, ``pack-quantized``) a value is (code - zero) * scale;
packed codes and packed zero points have the middle of their range added, the codes of a word are adjacent in a row, its
zero points adjacent in a column. ``fp8`` files hold 8-bit values with ``weight_scale_inv`` for each block, or one
``weight_scale``: both are factors by which a stored value is multiplied, in spite of the name. AWQ files (GEMM order)
hold codes [in, out / 8], each word holding eight output features of one input column. GPTQ files hold codes [in / (32 /
bits), out], each word holding consecutive input columns of one output feature; zero points are packed along the output,
and the first version of the format stores them minus one. MXFP4 files hold blocks of 32 values of 4 bits (e2m1) that
share a power of two (e8m0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import FP4_HALVES, Scheme, groups_of


@dataclass(frozen=True)
class RawWeight:
    """The tensors ``<name>.<suffix>`` of a weight [out, in].

    Args:
        label: name of the checkpoint, for messages.
        get: suffix -> tensor, None if it is not stored.
        dtype: the engine's dtype.
    """

    label: str
    name: str
    shape: tuple[int, int]
    scheme: Scheme
    get: Callable[[str], Tensor | None]
    dtype: torch.dtype

    def refuse(self, what: str) -> NoReturn:
        """Raises StartupError with the name of the weight."""
        raise StartupError(f"{self.label}: {self.name} {what}")

    def need(self, suffix: str, shape: tuple[int, ...], *types: torch.dtype) -> Tensor:
        """Returns the tensor [shape] of one of ``types``; raises StartupError if it is missing or different."""
        found = self.get(suffix)
        if found is None:
            raise StartupError(f"{self.label} lacks {self.name}.{suffix}, which {self.scheme.label} needs")
        return self.check(suffix, found, shape, *types)

    def check(self, suffix: str, found: Tensor, shape: tuple[int, ...], *types: torch.dtype) -> Tensor:
        """Returns ``found`` if it is [shape] of one of ``types``; otherwise raises StartupError."""
        if tuple(found.shape) != shape:
            out, inputs = self.shape
            raise StartupError(
                f"{self.label}: {self.name}.{suffix} has shape {list(found.shape)}, and {self.scheme.label} of the "
                f"{out} x {inputs} in config.json asks {list(shape)}"
            )
        if types and found.dtype not in types:
            self.refuse(f"has {found.dtype} in .{suffix}; it must be {' or '.join(map(str, types))}")
        return found

    def scales(self, found: Tensor, suffix: str) -> Tensor:
        """Converts scales to float32; raises StartupError unless all are finite and positive."""
        wide = found.float()
        if not bool(torch.isfinite(wide).all()) or not bool((wide > 0).all()):
            bad = wide[~(torch.isfinite(wide) & (wide > 0))][0]
            self.refuse(f"has a scale of {float(bad):g} in .{suffix}; every scale must be finite and above zero")
        return wide

    def groups(self) -> int:
        """Returns the number of groups in a row; raises StartupError if the group size does not divide the columns."""
        columns, group = self.shape[1], self.scheme.group
        if group and columns % group:
            fit = ", ".join(str(n) for n in (32, 64, 128) if columns % n == 0) or "a scale a row"
            self.refuse(f"has {columns} columns, which groups of {group} do not divide; {fit} would")
        return groups_of(columns, group)

    def order(self, found: Tensor | None, groups: int, suffix: str) -> Tensor | None:
        """Returns int32 [in], the group of each column; None if groups are consecutive columns."""
        if found is None or groups == 1:
            return None
        order = self.check(suffix, found, (self.shape[1],), torch.int32, torch.int64).int()
        if bool((order == -1).all()):  # the initial value: it was never set
            return None
        low, high = int(order.min()), int(order.max())
        if low < 0 or high >= groups:
            wrong = low if low < 0 else high
            self.refuse(f"has group {wrong} in .{suffix}; there are {groups} groups, from 0 to {groups - 1}")
        regular = torch.arange(self.shape[1], dtype=torch.int32) // (self.scheme.group or self.shape[1])
        return None if torch.equal(order, regular) else order

    def make_qtensor(self, data: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None) -> QTensor:
        """Returns the weight; zero points that are all zero are omitted."""
        if zero is not None and not bool(zero.any()):
            zero = None
        group = self.scheme.group or self.shape[1]
        return QTensor(self.scheme, data, scale, zero, group, order, self.dtype)


def unpack_words(words: Tensor, bits: int, dim: int, positions: Sequence[int] | None = None) -> Tensor:
    """Unpacks the unsigned integers of int32 words [a, b] to uint8; ``dim`` grows by a factor of 32 / bits.

    Args:
        positions: the position within the word of each integer; None: 0, 1, 2 and so on.
    """
    each = 32 // bits
    # A word's bytes are little-endian on every machine that torch runs on.
    view = words.flatten().contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 4:
        view = torch.stack([view & 15, view >> 4], -1).view(*words.shape, each)
    if positions is not None:
        view = view[..., list(positions)]
    if dim == 1:
        return view.reshape(words.shape[0], -1)
    return view.transpose(1, 2).reshape(-1, words.shape[1])


def pack_words(values: Tensor, bits: int, dim: int, positions: Sequence[int] | None = None) -> Tensor:
    """Packs unsigned integers [a, b] into int32 words, the inverse of ``unpack_words``.

    The last word is padded with zeros.
    """
    each = 32 // bits
    values = values if dim == 1 else values.t()
    missing = -values.shape[1] % each
    wide = torch.nn.functional.pad(values.long(), (0, missing)).view(values.shape[0], -1, each)
    spots = torch.tensor(list(positions) if positions is not None else list(range(each)))
    words = (wide << (spots * bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return (words if dim == 1 else words.t()).contiguous()


def signed(codes: Tensor, bits: int) -> Tensor:
    """Converts unsigned codes to int8 by subtracting the middle of their range, also used for zero points."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.bfloat16, torch.float16, torch.float32)


def read_compressed_tensors(raw: RawWeight) -> QTensor:
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


def read_fp8(raw: RawWeight) -> QTensor:
    """Reads a weight with scales laid out as in the scheme, or one per row if there are as many scales as rows."""
    data = raw.need("weight", raw.shape, *FLOAT8)
    suffix = "weight_scale_inv" if raw.get("weight_scale_inv") is not None else "weight_scale"
    found = raw.get(suffix)
    if found is not None and found.numel() == raw.shape[0] > 1 and raw.scheme.block == 0:
        raw = replace(raw, scheme=replace(raw.scheme, block=1))
    return raw.make_qtensor(data, scale_of(raw, suffix), None, None)


NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within the word of each of eight consecutive output features: even ones first."""


def read_awq(raw: RawWeight) -> QTensor:
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


def read_gptq(raw: RawWeight, missing: int = 1) -> QTensor:
    """Reads a weight whose zero points are stored minus ``missing`` (modulo the range)."""
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


MXFP4_BLOCK = 32
"""Values of a block, and the group of the scheme; two values share a byte, the first one in its low half."""

MXFP4_BIAS = 127
"""Bias of the stored exponents: 2 ** (stored - 127) is a block's scale."""


def read_mxfp4(raw: RawWeight) -> QTensor:
    """Reads a weight [out, in] of ``blocks`` [out, in / 32, 16], or [out, in / 2], and ``scales`` [out, in / 32], both
    uint8. Its integers are twice the values, so that nothing is rounded.
    """
    out, groups = raw.shape[0], raw.groups()
    found = raw.get("blocks")
    flat = found is not None and found.ndim == 2
    shape = (out, groups * MXFP4_BLOCK // 2) if flat else (out, groups, MXFP4_BLOCK // 2)
    blocks = raw.need("blocks", shape, torch.uint8)
    exponents = raw.need("scales", (out, groups), torch.uint8)
    if bool((exponents == 255).any()):
        raw.refuse("has a scale of NaN in .scales")
    table = torch.tensor(FP4_HALVES, dtype=torch.int8)
    codes = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1).view(raw.shape)
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - (MXFP4_BIAS + 1))
    return raw.make_qtensor(codes, scale, None, None)


READERS: dict[str, Callable[[RawWeight], QTensor]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "awq": read_awq,
    "gptq": read_gptq,
    "gptq_v2": partial(read_gptq, missing=0),
    "mxfp4": read_mxfp4,
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
