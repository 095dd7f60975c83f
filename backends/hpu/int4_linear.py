"""Weights of 4 bits on Gaudi: codes stay packed, and every product unpacks them to bfloat16 in its graph.

``convert_from_uint4`` takes eight codes an int32 along its last dimension, so a weight is transposed here. Its
values are (code - zero point) x scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.scheme import WORD, packs4

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
