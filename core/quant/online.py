"""Rounds a weight of 16 or 32 bits to a scheme, to the nearest code, with the best of a few scales a group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trencadis.core.errors import StartupError
from trencadis.core.quant.scheme import Scheme, groups_of
from trencadis.core.quant.tensor import SLAB, QTensor

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's largest magnitude that are tried as the range of 4 bits; the least squared error wins."""

TINY = 2.0**-60
"""Scale of a group of zeros."""


def quantised(
    weight: Tensor, scheme: Scheme, dtype: torch.dtype, what: str = "a weight", fixed: float | None = None
) -> QTensor:
    """Rounds a weight [out, in] of any floating type, a slab of rows at a time; ``fixed``: by this scale (floats).

    Raises:
        StartupError: a value is not finite.
    """
    rows, columns = weight.shape
    group = scheme.group or columns
    if weight.is_meta:
        scale = torch.empty((rows, groups_of(columns, group)), device="meta")
        kind = torch.float8_e4m3fn if scheme.kind == "float" else torch.int8
        return QTensor(scheme, torch.empty((rows, columns), dtype=kind, device="meta"), scale, None, group, None, dtype)
    step = max(SLAB // max(columns, 1), 1)
    codes, scales = [], []
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        if not bool(torch.isfinite(part).all()):
            raise StartupError(f"{what} holds values that are not finite, which have no code in {scheme.label}")
        code, scale = _rounded(part, scheme, group) if fixed is None else _by(part, fixed)
        codes.append(code)
        scales.append(scale)
    return QTensor(scheme, torch.cat(codes), torch.cat(scales), None, group, None, dtype)


def _by(values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Codes of 8-bit floats [out, in] and ``scale`` for each row [out, 1]."""
    most = torch.finfo(torch.float8_e4m3fn).max
    codes = (values / scale).clamp_(-most, most).to(torch.float8_e4m3fn)
    return codes, torch.full((values.shape[0], 1), scale)


def _rounded(values: Tensor, scheme: Scheme, group: int) -> tuple[Tensor, Tensor]:
    """Codes [out, in] and float32 scales [out, groups] of float32 values."""
    rows, columns = values.shape
    count = groups_of(columns, group)
    parts = functional.pad(values, (0, count * group - columns)).view(rows, count, group)
    top = parts.abs().amax(-1, keepdim=True)
    if scheme.kind == "float":
        scale = (top / torch.finfo(torch.float8_e4m3fn).max).clamp_min_(TINY)
        code = (parts / scale).to(torch.float8_e4m3fn)
    else:
        most = (1 << (scheme.bits - 1)) - 1
        scale = _scale(parts, top, most) if scheme.bits == 4 else (top / most).clamp_min_(TINY)
        code = (parts / scale).round_().clamp_(-most - (scheme.bits == 4), most).to(torch.int8)
    return code.view(rows, -1)[:, :columns].contiguous(), scale.squeeze(-1)


def _scale(parts: Tensor, top: Tensor, most: int) -> Tensor:
    """The scale of each group that leaves the least squared error."""
    best = error = None
    for clip in CLIPS:
        scale = (top * (clip / most)).clamp_min_(TINY)
        found = (parts / scale).round_().clamp_(-most - 1, most).mul_(scale).sub_(parts).square_().sum(-1, keepdim=True)
        if best is None or error is None:
            best, error = scale, found
        else:
            better = found < error
            best, error = torch.where(better, scale, best), torch.where(better, found, error)
    assert best is not None
    return best
