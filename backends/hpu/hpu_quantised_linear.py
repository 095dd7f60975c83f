"""Quantised weights on Gaudi: 8-bit floats with one scale a row, and codes of 4 bits that stay packed.

The e4m3 of checkpoint files reaches 448. That of a Gaudi 2 ends at 240, so there the codes of a weight that needs more
are halved and its scales doubled, which is exact but for the 16 codes whose last bit is lost. A weight with several
scales a row, or in e5m2, is rounded again to one a row; activations get one scale a token.

Codes of 4 bits are unpacked to bfloat16 in the graph of every product. ``convert_from_uint4`` takes eight codes an
int32 along its last dimension, so a weight is transposed here. Its values are (code - zero point) x scale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import FACTOR, WORD, packs4

log = logging.getLogger("trencadis.engine")

E4M3 = torch.float8_e4m3fn
TINY = 1e-30
"""Minimum magnitude of a token or a row, used for zeros."""

TAKEN = (torch.bfloat16, torch.float32)
"""Dtypes that the card's product returns."""


@dataclass(slots=True)
class Floats8Weight:
    """A weight [out, in] on the card.

    Args:
        codes: float8_e4m3fn [out, in], within the card's range.
        scale: float32 [out].
        activation: float32 [1, 1], the scale of every activation; None: each token has its own.
        bound: the largest activation that has a code with this scale.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    activation: Tensor | None
    bound: float
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and their scales."""
        return self.out_features * (self.in_features + FACTOR) + (0 if self.activation is None else FACTOR)


def round_tokens(x: Tensor, top: float, cast: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 codes of x [n, k], float32 [n, 1]: the scale of each token), by the card's ``cast``."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(TINY) / top
    return cast(x, 1.0 / scale), scale


def floats8_weight(q: QTensor, bias: Tensor | None, limit: float, device: torch.device) -> Floats8Weight:
    """Packs a weight of 8-bit floats, whose tensors are on the host, for a card whose e4m3 ends at ``limit``."""
    codes, scale = _rows(q) if q.data.dtype != E4M3 or q.scale.shape[1] > 1 else (q.data, q.scale[:, 0])
    if limit < torch.finfo(E4M3).max and _beyond(codes, limit):
        codes, scale = halve_codes(codes), scale * 2
    activation = None if q.activation is None else torch.full((1, 1), q.activation).to(device)
    bound = 0.0 if q.activation is None else q.activation * limit
    held = codes.contiguous().to(device), scale.float().contiguous().to(device)
    return Floats8Weight(*held, bias, activation, bound, *q.shape)


def _beyond(codes: Tensor, limit: float, step: int = 1024) -> bool:
    """Returns True if a code exceeds ``limit``."""
    return not codes.is_meta and any(bool((p.float().abs() > limit).any()) for p in torch.split(codes, step))


def halve_codes(codes: Tensor, step: int = 1024) -> Tensor:
    """Returns e4m3 codes [out, in] of half the values, rounded to the nearest even, 1024 rows at a time."""
    if codes.is_meta:
        return codes
    parts = [(part.float() * 0.5).to(E4M3) for part in torch.split(codes, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(q: QTensor, step: int = 1024) -> tuple[Tensor, Tensor]:
    """Rounds a weight again to e4m3 codes [out, in] with one float32 scale per row [out]."""
    if q.data.is_meta:
        return torch.empty(q.shape, dtype=E4M3, device="meta"), torch.empty(q.shape[0], device="meta")
    codes, scales = torch.empty(q.shape, dtype=E4M3), torch.empty(q.shape[0])
    for start in range(0, q.shape[0], step):
        values = q.rows(start, start + step).dequantised()
        scale = values.abs().amax(1).clamp_min_(TINY) / torch.finfo(E4M3).max
        codes[start : start + step] = (values / scale[:, None]).to(E4M3)
        scales[start : start + step] = scale
    return codes, scales


MIDDLE = 8
"""Offset of codes and zero points, which are from 0 to 15 on the card."""


@dataclass(slots=True)
class PackedWeight4:
    """A weight [out, in] on the card.

    Args:
        codes: int32 [in, out / 8], the first of eight neighbouring outputs in the lowest bits.
        scale: bfloat16 [groups, out]; groups have equal numbers of columns.
        zero: int32 [groups, out / 8], packed as the codes.
        gather: int32 [in], the input's column of each row of ``codes``; None: as they are.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    gather: Tensor | None
    bias: Tensor | None
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors except the bias."""
        return sum(t.nbytes for t in (self.codes, self.scale, self.zero, self.gather) if t is not None)


def packed4_weight(q: QTensor, bias: Tensor | None, device: torch.device) -> PackedWeight4 | None:
    """Packs a weight of 4 bits, whose tensors are on the host; returns None if the card's operation does not take
    it.
    """
    rows, columns = q.shape
    groups = q.scale.shape[1]
    if q.scheme.bits != 4 or q.shared or columns % groups or not packs4(rows, columns, columns // groups):
        return None
    data, gather = q.data, None
    if groups > 1:
        sizes = _sizes(q)
        if sizes is not None and bool((sizes != columns // groups).any()):
            return None
        if q.order is not None:
            gather = q.order.long().argsort(stable=True)
            data = data.index_select(1, gather)
    zero = torch.zeros_like(q.scale) if q.zero is None else q.zero.float()
    if not zero.is_meta and bool(((zero < -MIDDLE) | (zero >= MIDDLE)).any()):
        return None
    scale = q.scale.t().to(torch.bfloat16).contiguous()
    codes, zeros = (_words(t.t().int() + MIDDLE).to(device) for t in (data, zero))
    index = None if gather is None else gather.int().to(device)
    return PackedWeight4(codes, scale.to(device), zeros, index, bias, rows, columns)


def _sizes(q: QTensor) -> Tensor | None:
    """Returns the number of columns in each group, int64 [groups]; None if the values are not known."""
    where = q.columns()
    return None if where.is_meta else torch.bincount(where, minlength=q.scale.shape[1])


def _words(codes: Tensor) -> Tensor:
    """Packs int32 [n, m] with values from 0 to 15 into int32 [n, m / 8]."""
    parts = codes.reshape(codes.shape[0], -1, WORD)
    word = torch.zeros(parts.shape[:2], dtype=torch.int32, device=codes.device)
    for i in range(WORD):
        word |= parts[..., i] << (4 * i)
    return word
