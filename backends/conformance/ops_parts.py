"""Ops of decoders that are put together from parts: layer norms, activations and experts, against the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trencadis.backends.conformance.ops import Work, attention, compared, error_summary, randn, vs_reference
from trencadis.backends.conformance.result import CheckFailed, Skipped
from trencadis.backends.conformance.subject import Subject

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu")


def layer_norm(subject: Subject) -> str:
    """(x - mean) / deviation * w + b; with a residual, of the sum of both, which it returns too."""
    hidden = subject.model.text.hidden
    errors: list[float] = []
    for rows in (1, 19):
        # Away from zero, so that a deviation that is not taken from the mean shows.
        x, residual = 3 + randn(rows, hidden), 2 * randn(rows, hidden, seed=1)
        weight, bias = randn(hidden, seed=2), randn(hidden, seed=3)
        errors += vs_reference(subject, lambda ops, put: lambda a, w, b: ops.layer_norm(a, w, b, 1e-2), x, weight, bias)
        errors += vs_reference(
            subject, lambda ops, put: lambda a, w, b, r: ops.layer_norm(a, w, b, 1e-2, r), x, weight, bias, residual
        )
    return error_summary(errors)


def attend_window(subject: Subject) -> str:
    """As ``op.attend``, over the last keys of a window: shorter than a block, longer than one, longer than all rows."""
    if not subject.policy_of("windows"):
        raise Skipped("Policy.windows is False: this device serves no model with windows")
    return compared(subject, attention(subject, (0, 5, subject.block_size + 3, 100_000)))


def attend_upto(subject: Subject) -> str:
    """As ``op.attend``, where tokens see each other up to the end of their span, with and without a window."""
    if not subject.policy_of("upto"):
        raise Skipped("Policy.upto is False: this device attends causally")
    windows = (0, 7) if subject.policy_of("windows") else (0,)
    return compared(subject, attention(subject, windows, spans=True))


def act(subject: Subject) -> str:
    """Each activation, also far from zero."""
    x = 4 * randn(13, subject.model.text.intermediate)
    errors: list[float] = []
    for kind in ACTIVATIONS:
        errors += vs_reference(subject, _by_kind("act", kind), x)
    return error_summary(errors)


def act_mul(subject: Subject) -> str:
    """Each activation of the first half times the second half."""
    x = 2 * randn(13, 2 * subject.model.text.intermediate)
    errors: list[float] = []
    for kind in ACTIVATIONS:
        errors += vs_reference(subject, _by_kind("act_mul", kind), x)
    return error_summary(errors)


def experts(subject: Subject) -> str:
    """Each token takes its best experts, by their shares as they are or divided by their sum; padding takes some too.

    Scores lie apart, so that rounding them moves no choice. One expert that nobody chooses overflows.
    """
    hidden, inner, count, rows = subject.model.text.hidden, 24, 5, 19
    gate_up = [randn(2 * inner, hidden, seed=i) / hidden**0.5 for i in range(count)]
    down = [randn(hidden, inner, seed=9 + i) / inner**0.5 for i in range(count)]
    gate_up[-1] = gate_up[-1] * 1e4
    places = torch.rand(rows, count - 1, generator=torch.Generator().manual_seed(2)).argsort(-1)
    scores = torch.cat([0.5 * places, torch.full((rows, 1), -40.0)], 1)
    errors: list[float] = []
    for top, normalise, kind in ((1, False, "silu"), (2, True, "silu"), (3, False, "gelu_tanh")):
        for n in (1, rows):

            def setup(ops: Any, put: Any, how: tuple[int, bool, str] = (top, normalise, kind)) -> Work:
                packed = ops.pack_experts([put(w) for w in gate_up], [put(w) for w in down])
                if (packed.count, packed.inner) != (count, inner):
                    raise CheckFailed(f"pack_experts says {packed.count} experts of {packed.inner} columns")
                return lambda x, s: [ops.experts(x, s, packed, *how)]

            errors += vs_reference(subject, setup, _spread(n, hidden), scores[:n])
    return error_summary(errors)


def _spread(rows: int, width: int) -> Tensor:
    """Tokens of sizes that differ."""
    return randn(rows, width, seed=rows) * (1 + torch.arange(rows)[:, None] % 3)


def _by_kind(name: str, kind: str) -> Any:
    """The op ``name`` with its activation, as ``vs_reference`` takes it."""
    return lambda ops, put: lambda x: [getattr(ops, name)(x, kind)]
