"""A quantised weight: codes, scales, zero points; its values, and how it is split over ranks and joined in layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme, groups_of

SLAB = 1 << 24
"""Number of values that are converted at a time."""


@dataclass(frozen=True)
class QTensor:
    """A weight [out, in] whose value is (code - zero) * scale.

    Args:
        scheme: the scheme in which it was stored.
        data: the codes [out, in]: int8 (integers of 4 bits from -8 to 7), float8_e4m3fn or float8_e5m2.
        scale: float32 [out, groups].
        zero: int8 [out, groups] in the units of ``data``; None: all zero.
        group: columns per group; the last group may be shorter. Not used if there is an ``order``.
        order: int32 [in], the group of each column; None: groups are consecutive columns.
        dtype: the engine's dtype.
        activation: the divisor of activations before they are rounded; None: not given by a file.
    """

    scheme: Scheme
    data: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int
    order: Tensor | None
    dtype: torch.dtype
    activation: float | None = None

    @property
    def shared(self) -> bool:
        """True if it is a rank's share of columns whose groups are not consecutive."""
        ordered = self.scheme.ordered and self.order is not None
        return ordered and self.scale.shape[1] != groups_of(self.shape[1], self.scheme.group)

    @property
    def device(self) -> torch.device:
        """The device that holds the codes."""
        return self.data.device

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.data.shape[0], self.data.shape[1]

    def dequantised(self) -> Tensor:
        """Returns the exact values, float32 [out, in]."""
        values = self.data.float()
        if self.zero is not None:
            values -= self._spread(self.zero.float())
        return values.mul_(self._spread(self.scale))

    def values(self) -> Tensor:
        """Returns the values rounded to ``dtype``, converted in slabs of rows, as float32 takes twice the memory."""
        rows, columns = self.shape
        step = max(SLAB // max(columns, 1), 1)
        if rows <= step:
            return self.dequantised().to(self.dtype)
        out = torch.empty((rows, columns), dtype=self.dtype, device=self.data.device)
        for start in range(0, rows, step):
            out[start : start + step] = self.rows(start, start + step).dequantised()
        return out

    def _spread(self, each: Tensor) -> Tensor:
        """Expands a value per group to one per column: [out, groups] -> [out, in], or [out, 1]."""
        if each.shape[1] == 1:
            return each
        return each.index_select(1, self.columns())

    def columns(self) -> Tensor:
        """Returns int64 [in]: the group of each column."""
        if self.order is not None:
            return self.order.long()
        return torch.arange(self.shape[1], device=self.data.device) // self.group

    def rows(self, start: int, stop: int) -> QTensor:
        """Returns the output features [start, stop)."""
        zero = None if self.zero is None else self.zero[start:stop]
        return replace(self, data=self.data[start:stop], scale=self.scale[start:stop], zero=zero)

    def inputs(self, start: int, stop: int) -> QTensor:
        """Returns the input columns [start, stop). If a split cuts a group, groups become smaller."""
        if (start, stop) == (0, self.shape[1]):
            return self
        data = self.data[:, start:stop]
        if self.scale.shape[1] == 1:
            order = None if self.order is None else self.order[start:stop]
            return replace(self, data=data, group=stop - start, order=order)
        if self.order is not None:  # every share keeps all groups, so that its size is known in advance
            return replace(self, data=data, order=self.order[start:stop])
        end = stop if stop < self.shape[1] else 0
        whole = self.regrouped(gcd(gcd(self.group, start), end))
        first, last = start // whole.group, groups_of(stop, whole.group)
        zero = None if whole.zero is None else whole.zero[:, first:last]
        return replace(whole, data=data, scale=whole.scale[:, first:last], zero=zero)

    def regrouped(self, group: int) -> QTensor:
        """Returns the same values in groups of ``group`` columns, which must divide the present group size."""
        if group == self.group:
            return self
        where = torch.arange(groups_of(self.shape[1], group), device=self.scale.device) * group // self.group
        return replace(self, scale=self.scale[:, where], zero=_columns(self.zero, where), group=group)

    def moved(self, device: torch.device) -> QTensor:
        """Returns a copy on ``device``."""
        zero, order = (None if t is None else t.to(device) for t in (self.zero, self.order))
        return replace(self, data=self.data.to(device), scale=self.scale.to(device), zero=zero, order=order)

    def padded(self, rows: int, columns: int) -> QTensor:
        """Returns the weight padded with zeros to [rows, columns]."""
        below, right = rows - self.shape[0], columns - self.shape[1]
        found = self
        if right and self.scale.shape[1] == 1:
            value = self.zero if self.zero is not None else self.data.new_zeros((self.shape[0], 1))
            data = torch.cat([self.data, value.to(self.data.dtype).expand(-1, right)], 1)
            found = replace(self, data=data, group=columns, order=None)
        elif right and self.order is not None:  # no additional group: the padding belongs to the first one
            value = self.zero[:, :1] if self.zero is not None else self.data.new_zeros((self.shape[0], 1))
            data = torch.cat([self.data, value.to(self.data.dtype).expand(-1, right)], 1)
            found = replace(self, data=data, order=functional.pad(self.order, (0, right)))
        elif right:  # fill the last group, then add groups of zeros
            more = groups_of(columns, self.group) - self.scale.shape[1]
            inside = min(self.scale.shape[1] * self.group, columns) - self.shape[1]
            value = self.zero[:, -1:] if self.zero is not None else self.data.new_zeros((self.shape[0], 1))
            data = torch.cat([self.data, value.to(self.data.dtype).expand(-1, inside)], 1)
            found = replace(
                self,
                data=torch.cat([data, data.new_zeros((self.shape[0], right - inside))], 1),
                scale=functional.pad(self.scale, (0, more), value=1.0),
                zero=None if self.zero is None else functional.pad(self.zero, (0, more)),
            )
        if below:
            each = found.scale.shape[1]
            zero = found.zero
            found = replace(
                found,
                data=torch.cat([found.data, found.data.new_zeros((below, columns))]),
                scale=torch.cat([found.scale, found.scale.new_ones((below, each))]),
                zero=None if zero is None else torch.cat([zero, zero.new_zeros((below, each))]),
            )
        return found


def _columns(each: Tensor | None, where: Tensor) -> Tensor | None:
    return None if each is None else each[:, where]


def fits(a: QTensor, b: QTensor) -> bool:
    """Returns True if two weights with the same input can be joined."""
    same = (a.data.dtype, a.scheme.bits, a.activation) == (b.data.dtype, b.scheme.bits, b.activation)
    same = same and a.scheme.fp4 == b.scheme.fp4
    if a.order is None or b.order is None:
        return same and a.order is b.order
    return same and torch.equal(a.order, b.order)


def join_weights(parts: list[QTensor]) -> QTensor:
    """Joins weights with the same input by concatenating their output features. All must fit the first (``fits``)."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.order is None:
        group = 0
        for part in parts:
            group = gcd(group, part.group)
        parts = [part.regrouped(group) for part in parts]
    each = max(part.scale.shape[1] for part in parts)
    zero = None
    if any(part.zero is not None for part in parts):
        zero = torch.cat([_wide(_zero(part), each) for part in parts])
    scale = torch.cat([_wide(part.scale, each) for part in parts])
    return replace(parts[0], data=torch.cat([part.data for part in parts]), scale=scale, zero=zero)


def _zero(part: QTensor) -> Tensor:
    return part.zero if part.zero is not None else torch.zeros(part.scale.shape, dtype=torch.int8)


def _wide(each: Tensor, groups: int) -> Tensor:
    """Pads [out, groups] by repeating the last group.

    Such groups, which an ``order`` may leave at the end, have no columns.
    """
    missing = groups - each.shape[1]
    return each if missing == 0 else torch.cat([each, each[:, -1:].expand(-1, missing)], 1)
