"""The check of products with quantised weights: the dequantised weight, in float32, times the activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trencadis.backends.conformance.check_result import CheckFailed
from trencadis.backends.conformance.op_checks import Work, check_close, error_summary, randn, vs_reference
from trencadis.backends.conformance.target import CheckTarget
from trencadis.core.quant import online_quant
from trencadis.core.quant.quantised_tensor import QTensor
from trencadis.core.quant.scheme import FLOATS8, Scheme

ROUNDED = {"int": 2e-2, "float": 4e-2}
"""Largest allowed error of a row, as a share of its norm, if activations are rounded to 8 bits of a kind."""

SCHEMES = (
    Scheme(8), Scheme(8, activations="token"), Scheme(8, group=32), Scheme(4, group=32), Scheme(4, group=64),
    Scheme(4, group=32, symmetric=False), Scheme(8, "float", activations="token"),
)  # fmt: skip


def quantised_linear(target: CheckTarget) -> str:
    """x W^T + b of weights in 8 and 4 bits, by row and by group; the weight states its widths and its bytes."""
    hidden, wide = target.model.text.hidden, 96
    errors: list[float] = []
    host = target.backend().policy.quantised == FLOATS8
    for scheme in SCHEMES[: 4 if target.quick else None]:
        q = _weight(randn(wide, hidden, seed=1) / hidden**0.5, scheme)

        def close(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, scheme: Scheme = scheme) -> float:
            return _check_near(f"{scheme.label}, {what}", found, wanted, dtype, scheme)

        for rows in (1, 5, 37):

            def setup(ops: Any, put: Any, q: QTensor = q) -> Work:
                bias = put(randn(wide, seed=2))
                packed = ops.pack_quantised(_move_weight(q, bias, host), bias)
                if (packed.out_features, packed.in_features) != q.shape:
                    raise CheckFailed(f"pack_quantised says {packed.out_features} x {packed.in_features}")
                return lambda x: [ops.linear(x, packed)]

            errors += vs_reference(target, setup, randn(rows, hidden, seed=rows), close=close)
    return error_summary(errors)


def _weight(weight: Tensor, scheme: Scheme) -> QTensor:
    """Quantises a weight as loading does; asymmetric schemes get arbitrary zero points."""
    q = online_quant.quantise(weight, scheme, torch.float32)
    if scheme.symmetric:
        return q
    zero = torch.arange(q.scale.numel()).view(q.scale.shape) % 5 - 2
    return replace(q, zero=zero.to(torch.int8))


def _move_weight(q: QTensor, bias: Tensor, host: bool) -> QTensor:
    """Puts a weight where a loader would leave it (``host``: not on the device), with the dtype of ``bias``."""
    found = replace(q, dtype=bias.dtype)
    return found if host or bias.device.type == "cpu" else found.moved(bias.device)


def _check_near(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, scheme: Scheme) -> float:
    """Runs ``check_close``; 8-bit activations, and groups that are rounded again, are compared by rows instead."""
    try:
        return check_close(what, found, wanted, dtype)
    except CheckFailed:
        if found.shape != wanted.shape:
            raise
    away = (found.cpu().float() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1)
    error = float(away.max())
    if not error <= ROUNDED[scheme.kind]:
        raise CheckFailed(f"{what}: off by {error:.2g} of a row's norm; the tolerance is {ROUNDED[scheme.kind]:.0e}")
    return error
