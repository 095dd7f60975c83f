"""Quantised weights in the form in which a card stores them: the codes of the checkpoint, and the scales to decode
them.

A weight's value is (code - zero) x scale of its group x factor of its row. Two 4-bit codes share a byte, so that
the two halves of a tile are neighbouring columns (``core.quant.quantised_weight_layout_and_bytes.half_of``). 8-bit
floats are decoded by shifting their bits into a float16, which is the value over 256 for every code of e4m3 and the
value itself for e5m2; the factor compensates for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import (
    BLOCK_SIZE,
    CELL,
    FOURS,
    FP4_HALVES,
    cells,
    cut_columns,
    half_of,
    has_block_scales,
)

INT8, INT4, E4M3, E5M2, FP4 = range(5)
"""Kinds of codes; 4-bit floats (e2m1) are kept for experts alone."""

FOUR_BITS = (INT4, FP4)
"""Kinds of which two codes share a byte."""

SHIFTED = 256.0
"""Factor by which the bits of an e4m3, shifted into a float16, are too small."""

MIDDLE = 8
"""Offset of 4-bit codes and of their zero points."""

ROUNDS_FLOATS = 89
"""Compute capability x 10 from which a card multiplies 8-bit floats."""

NEWEST = 90
"""Compute capability x 10 of the card that the twin simulates."""

LARGEST = {INT8: 127.0, E4M3: 448.0}
"""Kind -> largest code of an activation."""


@dataclass(slots=True)
class QuantisedWeight:
    """A weight [out, in] as codes, with the tensors that decode them.

    Args:
        codes: [out, bytes]: int8, or uint8 of floats or of two codes.
        factor: float32 [out].
        scale: [groups, out], float16 of values up to 1 (float32 if the engine's dtype is); None: only the factor.
        zero: int8 [groups or 1, out], of 4 bits with ``MIDDLE`` added; None: no zero points.
        gather: int32 [columns], the input's column of each column; None: in order.
        columns: stored columns; groups are padded with zeros.
        group: columns of a group; 0: one group per row.
        rounds: activations are rounded to 8 bits of the same kind, with one scale per token.
        blocks: float32 [output features / 128, columns / 128, filled up to ``FOURS``], the scale of each block of an
            e4m3 weight whose activations are rounded with a scale for each 128 columns of a token; None: they are not.
    """

    codes: Tensor
    factor: Tensor
    scale: Tensor | None
    zero: Tensor | None
    gather: Tensor | None
    bias: Tensor | None
    kind: int
    columns: int
    group: int
    rounds: bool
    out_features: int
    in_features: int
    blocks: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors except the bias."""
        held = (self.codes, self.factor, self.scale, self.zero, self.gather, self.blocks)
        return sum(t.nbytes for t in held if t is not None)


def pack_quantised_weight(q: QTensor, bias: Tensor | None, arch: int, by_blocks: bool = False) -> QuantisedWeight:
    """Packs a weight for a card of compute capability ``arch`` / 10.

    ``by_blocks``: the card has products of 8-bit floats with a scale for each block.

    Raises:
        StartupError: a code of a float is not finite.
    """
    kind = _kind(q)
    data, scale, zero, gather, group = _arrange_codes(q)
    if kind in (E4M3, E5M2):
        _check_finite(data, kind)
    factor, parts = _factors(2 * scale if kind == FP4 else scale, q.dtype)
    if kind == FP4:
        data = _HALF_CODES.to(data.device)[(data + 12).int()]
    codes = _halves(data, group, MIDDLE if kind == INT4 else 0) if kind in FOUR_BITS else data
    if zero is None and not q.scheme.symmetric and q.scheme.kind == "int":
        zero = torch.zeros_like(scale, dtype=torch.int8)  # the planner charges zero points
    if zero is not None:
        zero = (zero.t() + MIDDLE if kind == INT4 else zero.t()).to(torch.int8).contiguous()
    rounds = q.scheme.activations != "none" and group == 0 and zero is None and _rounds(kind, q, arch)
    if kind == E4M3:
        factor = factor * SHIFTED
    return QuantisedWeight(
        codes.contiguous(), factor.contiguous(), parts, zero, gather, bias, kind, data.shape[1], group, rounds,
        *q.shape, _find_blocks(q) if by_blocks and kind == E4M3 and gather is None else None,
    )  # fmt: skip


def _find_blocks(q: QTensor) -> Tensor | None:
    """Returns the scales of a weight's blocks, as in ``QuantisedWeight``; None if its scheme rounds no activations so,
    or its rows do not share scales by 128, as where matrices whose sizes are no multiples of that were joined.
    """
    rows, columns = q.shape
    fits = q.group == BLOCK_SIZE and q.dtype.itemsize == 2 and has_block_scales(q.scheme, rows, columns)
    if not fits or q.scale.shape[1] != columns // BLOCK_SIZE:
        return None
    each = q.scale[::BLOCK_SIZE]
    if not each.is_meta and not torch.equal(each.repeat_interleave(BLOCK_SIZE, 0)[:rows], q.scale):
        return None
    return functional.pad(each, (0, -each.shape[1] % FOURS)).contiguous()


_HALF_CODES = torch.tensor([FP4_HALVES.index(value) if value in FP4_HALVES else 0 for value in range(-12, 13)]).to(
    torch.int8
)
"""Twice the value of a 4-bit float, plus 12 -> its code."""


def _kind(q: QTensor) -> int:
    if q.scheme.fp4:
        return FP4
    if q.data.dtype == torch.int8:
        return INT4 if q.scheme.bits == 4 else INT8
    return E4M3 if q.data.dtype == torch.float8_e4m3fn else E5M2


def _rounds(kind: int, q: QTensor, arch: int) -> bool:
    """Returns True if the card has 8-bit products for this weight (floats: rows and columns by 16, in bfloat16)."""
    if kind == E4M3:
        return arch >= ROUNDS_FLOATS and q.dtype == torch.bfloat16 and not any(n % 16 for n in q.shape)
    return kind == INT8


def _check_finite(data: Tensor, kind: int) -> None:
    if data.is_meta:  # plan --time: there are no values
        return
    size = data & 0x7F
    if bool((size == 0x7F).any() if kind == E4M3 else (size >= 0x7C).any()):
        raise StartupError("a weight holds 8-bit floats that are not finite; the checkpoint is damaged")


class _ArrangedCodes(NamedTuple):
    """Codes in the order of the card: ``codes`` [out, columns] as bits, float32 ``scale`` and ``zero`` [out, groups],
    the ``gather``-ed columns, and the columns of a ``group`` (0: one group per row).
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    gather: Tensor | None
    group: int


def _arrange_codes(q: QTensor) -> _ArrangedCodes:
    """Orders the columns of a weight so that each group has whole cells."""
    data = q.data if q.data.dtype == torch.int8 else q.data.view(torch.uint8)
    if q.scale.shape[1] == 1:
        return _ArrangedCodes(data, q.scale, q.zero, None, 0)
    kept = cells(q.shape[1], q.group)
    if q.order is None and not kept.gathered:
        return _ArrangedCodes(data, q.scale, q.zero, None, kept.group)
    of = q.columns()
    where, counts = torch.argsort(of, stable=True), torch.bincount(of, minlength=q.scale.shape[1])
    sizes: list[int] = counts.tolist()
    each = sizes[0]
    if not q.shared and each and each % CELL == 0 and all(n == each for n in sizes[:-1]) and sizes[-1] <= each:
        plain = bool((where[1:] > where[:-1]).all())
        codes, gather = (data, None) if plain else (data[:, where], where.int())
        return _ArrangedCodes(codes, q.scale, q.zero, gather, each)
    return _fill_groups(q, data, where, sizes)


def _fill_groups(q: QTensor, data: Tensor, where: Tensor, sizes: list[int]) -> _ArrangedCodes:
    """Pads groups of unequal sizes to whole cells with codes that mean zero."""
    device = data.device
    count = [-(-n // CELL) for n in sizes]
    if q.shared:  # pads up to the size that the planner charges
        sizes = [*sizes, 0]
        count.append(cut_columns(q.shape[1], q.scale.shape[1]) // CELL - sum(count))
    numbers = torch.arange(len(sizes), device=device) % q.scale.shape[1]
    of = torch.repeat_interleave(numbers, torch.tensor(count, device=device))
    slots, at = [], 0
    for n, cell in zip(sizes, count, strict=True):
        slots.append(torch.arange(at, at + n, device=device))
        at += cell * CELL
    taken = torch.cat(slots)
    zero = None if q.zero is None else q.zero[:, of]
    out = data.new_zeros((data.shape[0], at))
    if zero is not None:
        out = zero.repeat_interleave(CELL, 1).to(data.dtype)
    out[:, taken] = data[:, where]
    gather = torch.zeros(at, dtype=torch.int32, device=device)
    gather[taken] = where.int()
    return _ArrangedCodes(out, q.scale[:, of], zero, gather, CELL)


def _factors(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Splits scales into float32 [out] factors and the rest for each group, [groups, out]; None if there is one group
    per row.

    Factors are powers of two, so that 16-bit scales lose nothing unless those of one row span the whole range.
    """
    if scale.shape[1] == 1:
        return scale[:, 0].clone(), None
    factor = torch.ldexp(torch.ones_like(scale[:, 0]), torch.frexp(scale.amax(1))[1])
    kept = torch.float32 if dtype == torch.float32 else torch.float16
    return factor, (scale / factor[:, None]).t().contiguous().to(kept)


def _halves(data: Tensor, group: int, middle: int) -> Tensor:
    """Packs 4-bit codes [out, columns] plus ``middle`` into uint8 [out, bytes]: column i in the low bits, i + half in
    the high ones.
    """
    half = half_of(group)
    wide = functional.pad(data, (0, -data.shape[1] % (2 * half))) + middle
    pairs = wide.view(torch.uint8).view(data.shape[0], -1, 2, half)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)


def dequantise(w: QuantisedWeight) -> Tensor:
    """Returns float32 [out, columns], in the order of the stored columns: the values that the kernels multiply by."""
    rows = w.codes.shape[0]
    if w.kind in FOUR_BITS:
        half = half_of(w.group)
        pairs = w.codes.view(rows, -1, 1, half)
        held = torch.cat([pairs & 15, pairs >> 4], 2).reshape(rows, -1)[:, : w.columns]
        if w.kind == FP4:
            codes = (torch.tensor(FP4_HALVES, device=held.device) / 2)[held.int()]
        else:
            codes = held.float() if w.zero is not None else held.float() - MIDDLE
    elif w.kind == INT8:
        codes = w.codes.float()
    else:
        codes = float8_to_half(w.codes, w.kind).float()
    if w.zero is not None:
        codes -= _wide(w.zero, w)
    if w.scale is not None:
        codes *= _wide(w.scale, w)
    return codes * w.factor[:, None]


def float8_to_half(codes: Tensor, kind: int) -> Tensor:
    """Returns the float16 of the bits of 8-bit floats (uint8): their values, for e4m3 divided by ``SHIFTED``."""
    wide = codes.to(torch.int16)
    if kind == E5M2:
        return (wide << 8).view(torch.float16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).view(torch.float16)


def _wide(each: Tensor, w: QuantisedWeight) -> Tensor:
    """Expands per-group values to [out, columns], or [out, 1] if there is one group per row."""
    if not w.group:
        return each.t().float()
    return each.t().float().repeat_interleave(w.group, 1)[:, : w.columns]


def round_activations(x: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Rounds activations as the card does: (codes [..., in] as float32, float32 scales [..., 1]), one scale per row."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST[kind]
    codes = wide / scale
    return codes.round() if kind == INT8 else codes.to(torch.float8_e4m3fn).float(), scale


def round_groups(x: Tensor) -> Tensor:
    """Returns float32 activations [n, in], rounded to e4m3 with a scale for each ``BLOCK_SIZE`` columns of a row."""
    codes, scale = round_activations(x.reshape(len(x), -1, BLOCK_SIZE), E4M3)
    return (codes * scale).flatten(1)


TINY = 1e-30
"""Minimum magnitude of a token, used for zeros."""


def product(x: Tensor, w: QuantisedWeight, values: Tensor | None = None) -> Tensor:
    """Multiplies [n, in] -> [n, out] in ``x``'s dtype, in plain torch; ``values``: ``dequantise(w)``, if it is
    known.
    """
    values = dequantise(w) if values is None else values
    x = x if w.gather is None else x.index_select(1, w.gather)
    if w.rounds:
        codes, scale = round_activations(x, w.kind)
        y = functional.linear(codes, values) * scale
    else:
        y = functional.linear(x.float() if w.blocks is None else round_groups(x), values)
    return (y if w.bias is None else y + w.bias.float()).to(x.dtype)
