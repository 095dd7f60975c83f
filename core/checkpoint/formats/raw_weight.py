"""Access to the stored tensors of one weight, with checks, for the readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.scheme import Scheme, groups_of


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
