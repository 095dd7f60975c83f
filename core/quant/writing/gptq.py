"""GPTQ: columns are rounded one after the other, and those not yet rounded make up for each one's error.

With G = X^T X of the inputs X [tokens, in], rounding column j to q costs e = (w_j - q) / U[j, j], where U is the upper
Cholesky factor of G's inverse, and subtracting e U[j, k] from every later column k leaves the least error of the
output (Frantar et al. 2022, "GPTQ", equations 2 to 4 and algorithm 1). Columns with the largest inputs come first;
groups stay neighbours, and their scales are those of the weight as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trencadis.core.quant.online import Search, codes_of, decoded, finite, scales_of, spread
from trencadis.core.quant.scheme import Scheme
from trencadis.core.quant.tensor import QTensor

DAMP = 0.01
"""Share of the mean of G's diagonal that is added to it."""
BLOCK = 128
"""Columns whose errors reach the later ones by one product."""


def compensated(weight: Tensor, gram: Tensor, scheme: Scheme, dtype: torch.dtype, search: Search, what: str) -> QTensor:
    """Rounds a weight [out, in] for inputs of which float32 ``gram`` [in, in] is the sum of products.

    Where it has no factor even when damped, the nearest codes are taken. Three tensors [in, in] are held at a time.

    Raises:
        StartupError: a value is not finite.
    """
    wide, (rows, columns) = finite(weight, scheme, what), weight.shape
    group, size = scheme.group or columns, gram.diagonal().clone()
    scale = scales_of(wide, scheme, search, size + DAMP * size.mean() if size.any() else None)
    order = torch.sort(size, descending=True, stable=True).indices
    factor = _factor(gram, size, order)
    if factor is None:
        codes = codes_of(wide, spread(scale, columns, group), scheme)
    else:
        each = spread(scale, columns, group).expand(rows, columns)
        walked = _walk(wide[:, order], factor, each[:, order], scheme)
        codes = walked.view(torch.int8)[:, order.argsort()].view(walked.dtype)
    return QTensor(scheme, codes, scale, None, group, None, dtype)


def _factor(gram: Tensor, size: Tensor, order: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse of ``gram`` in ``order``; None if there is none."""
    size, mean = size[order], float(size.mean())
    # An input that is never anything but zero is left to itself.
    size = torch.where(size > 0, size, mean or 1.0)
    for damp in (DAMP, 10 * DAMP, 100 * DAMP):
        held: Tensor = gram[order][:, order]  # few at a time, since the largest take gigabytes
        held.diagonal().copy_(size + damp * mean)
        held, failed = torch.linalg.cholesky_ex(held)
        if not bool(failed):
            held = torch.cholesky_inverse(held)
            held, failed = torch.linalg.cholesky_ex(held, upper=True)
            if not bool(failed) and bool(torch.isfinite(held).all()):
                return held
    return None


def _walk(weight: Tensor, factor: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """The codes of float32 [out, in] from the first column to the last; ``weight`` is overwritten."""
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn if scheme.kind == "float" else torch.int8)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        own, near = weight[:, start:stop].t().contiguous(), factor[start:stop, start:stop]
        scales, away = scale[:, start:stop].t().contiguous(), torch.empty((stop - start, rows))
        for j in range(stop - start):
            found = codes_of(own[j], scales[j], scheme)
            codes[:, start + j] = found
            away[j] = (own[j] - decoded(found, scales[j])) / near[j, j]
            own[j + 1 :].addr_(near[j, j + 1 :], away[j], alpha=-1)
        weight[:, stop:].addmm_(away.t(), factor[start:stop, stop:], alpha=-1)
    return codes
