"""Quantises a weight of 16 or 32 bits to the nearest codes, with the best of several scales per group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.errors import StartupError
from trencadis.core.quant.quantised_tensor import SLAB, QTensor
from trencadis.core.quant.quantised_weight_layout_and_bytes import Scheme, groups_of


@dataclass(frozen=True)
class ScaleSearch:
    """The scales that are tried, and the dtype that they are stored in.

    Args:
        clips: fractions of a group's largest magnitude that are tried as its range; the least squared error wins.
        scales: the dtype that a scale is rounded to before codes are computed.
    """

    clips: tuple[float, ...] = (1.0,)
    scales: torch.dtype = torch.float32


PLAIN = ScaleSearch()
SHORT = ScaleSearch((1.0, 0.95, 0.9, 0.85, 0.8))
"""Search for 4-bit weights while they load."""

TINY = 2.0**-60
"""Scale of a group of zeros."""


def quantise(
    weight: Tensor, scheme: Scheme, dtype: torch.dtype, what: str = "a weight", search: ScaleSearch | None = None,
    fixed: float | None = None,
) -> QTensor:  # fmt: skip
    """Quantises a weight [out, in] of any float dtype, in slabs of rows; ``fixed``: a given scale (floats only).

    Raises:
        StartupError: a value is not finite.
    """
    rows, columns = weight.shape
    group = scheme.group or columns
    if weight.is_meta:
        scale = torch.empty((rows, groups_of(columns, group)), device="meta")
        kind = torch.float8_e4m3fn if scheme.kind == "float" else torch.int8
        return QTensor(scheme, torch.empty((rows, columns), dtype=kind, device="meta"), scale, None, group, None, dtype)
    tried = search or (SHORT if scheme.bits == 4 else PLAIN)
    step = max(SLAB // max(columns, 1), 1)
    codes, scales = [], []
    for start in range(0, rows, step):
        part = finite(weight[start : start + step], scheme, what)
        if fixed is None:
            scale = scales_of(part, scheme, tried)
            codes.append(codes_of(part, spread(scale, columns, group), scheme))
        else:
            scale = torch.full((part.shape[0], 1), fixed)
            codes.append(codes_of(part, scale, scheme))
        scales.append(scale)
    return QTensor(scheme, torch.cat(codes), torch.cat(scales), None, group, None, dtype)


def finite(weight: Tensor, scheme: Scheme, what: str) -> Tensor:
    """Converts a weight to float32; raises StartupError if a value is not finite."""
    wide = weight.float()
    if not bool(torch.isfinite(wide).all()):
        raise StartupError(f"{what} holds values that are not finite, which have no code in {scheme.label}")
    return wide


def scales_of(values: Tensor, scheme: Scheme, search: ScaleSearch, importance: Tensor | None = None) -> Tensor:
    """Returns float32 [out, groups]: the scale with the least squared error for each group of values, float32 [out,
    in].

    ``importance``: float32 [in], the weight of each column's squared error; None: all equal.
    """
    rows, columns = values.shape
    group = scheme.group or columns
    count = groups_of(columns, group)
    missing = count * group - columns
    parts = functional.pad(values, (0, missing)).view(rows, count, group)
    weight = None if importance is None else functional.pad(importance, (0, missing)).view(count, group)
    top = parts.abs().amax(-1, keepdim=True)
    most = torch.finfo(torch.float8_e4m3fn).max if scheme.kind == "float" else (1 << (scheme.bits - 1)) - 1
    least = max(TINY, torch.finfo(search.scales).tiny)
    best = error = None
    for clip in search.clips:
        scale = (top * (clip / most)).clamp_min_(least).to(search.scales).float()
        if len(search.clips) == 1:
            return scale.squeeze(-1)
        away = decode(codes_of(parts, scale, scheme), scale).sub_(parts).square_()
        found = (away if weight is None else away.mul_(weight)).sum(-1, keepdim=True)
        if best is None or error is None:
            best, error = scale, found
        else:
            better = found < error
            best, error = torch.where(better, scale, best), torch.where(better, found, error)
    assert best is not None
    return best.squeeze(-1)


def codes_of(values: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Returns the nearest codes of float32 values with scales that broadcast: float8_e4m3fn or int8."""
    if scheme.kind == "float":
        most = torch.finfo(torch.float8_e4m3fn).max
        return (values / scale).clamp_(-most, most).to(torch.float8_e4m3fn)
    most = (1 << (scheme.bits - 1)) - 1
    return (values / scale).round_().clamp_(-most - (scheme.bits == 4), most).to(torch.int8)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns the float32 values of codes."""
    return codes.float().mul_(scale)


def spread(scale: Tensor, columns: int, group: int) -> Tensor:
    """Expands a scale per group to one per column: [out, groups] -> [out, in], or [out, 1]."""
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(group, 1)[:, :columns]
